//! Changing a VF's settings with `vm.set-vf`.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use pci::VfIndex;
use serde_json::{Map, Value};
use virtio_devices::{PortSettings, Replaced, Status};

use super::{Instance, no_device};
use crate::api::{Failure, SetVf};
use crate::config::subject::Subject;
use crate::config::{BackendPlan, LinkPolicy, MacAddress, NicPlan, PlannedVm, PolicyConfig, net::switch};
use crate::control::set_vf;
use crate::devices::Plugged;
use crate::error_kind::ErrorKind;
use crate::telemetry::events::Source;

impl Instance {
    /// Changes a VF's link, MAC address and policy, and its configuration except for the link. Restrictions are in
    /// effect on success.
    ///
    /// # Errors
    ///
    /// Fails without a change if there is no such VF, another function has the address, a driver already uses the VF,
    /// or the request cannot be enforced. Fails after the change if a worker still handles packets from before it after
    /// 5 s; the change applies to all other packets.
    pub(crate) fn set_vf(&mut self, change: &SetVf, fds: Vec<OwnedFd>) -> Result<(), Failure> {
        let numbers: Vec<_> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        if let Some(backend) = change.backend(&numbers) {
            return self.connect(change, &backend, fds);
        }
        let SetVf { pf, index, policy: PolicyConfig { link, .. }, mac, .. } = change;
        let Some(index) = index else {
            let what = "give the index of a VF; only a backend can be given to the NIC itself";
            return Err(Failure::new(ErrorKind::Invalid, format!("pf={pf}: {what}")));
        };
        let vm = self.vm.as_ref().ok_or_else(|| {
            Failure::new(ErrorKind::Conflict, "the VM is not booted; give the VF's settings in vm.create or vm.add-net")
        })?;
        let plugged = vm.devices().find(pf).ok_or_else(|| no_device(pf))?;
        let reserved = plugged.plan().total_vfs();
        let no_vf = || {
            let line = match reserved.checked_sub(1) {
                Some(last) => format!("pf={pf},index={index}: {pf} reserves {reserved} VFs; index must be 0 to {last}"),
                None => format!("pf={pf},index={index}: {pf} reserves no VFs; name a NIC with sriov_vfs"),
            };
            Failure::new(ErrorKind::NotFound, line)
        };
        if *index >= reserved {
            return Err(no_vf());
        }
        let planned = self.planned_with_vf(change)?;
        let plan =
            planned.as_ref().map(|planned| set_vf::plan_of(planned, pf, *index).ok_or_else(no_vf)).transpose()?;
        let now = set_vf::plan_of(&self.planned, pf, *index);
        let before = self.settings(pf, *index);
        let set = plugged.slot().with(|device| {
            let vf = Some(VfIndex(*index));
            let driven = device.function_status(vf).is_some_and(|status| status.driver.contains(Status::DRIVER));
            let port = device.port(vf).ok_or_else(no_vf)?;
            if let Some(plan) = plan {
                set_vf::check_enforced(plan, port.backend_kind(), &Subject::requested_vf(pf, *index))?;
            }
            let mut replaced = Vec::new();
            if mac.is_some()
                && let Some(plans) = now.zip(plan)
            {
                replaced.push(set_vf::set_mac(port, change, plans, driven)?);
            }
            if let Some(link) = link {
                replaced.push(port.set_link(*link != LinkPolicy::Down));
            }
            replaced.extend(plan.map(|plan| port.set_policy(plan.spec.policy.clone(), plan.spec.limits)));
            Ok(replaced)
        });
        // Without the device's lock, which vCPUs take.
        let mut replaced = set.unwrap_or_else(|| Err(no_vf()))?.into_iter().fold(Replaced::default(), Replaced::and);
        if let Some(plan) = plan.or(now) {
            let link = link.unwrap_or_else(|| self.policy(pf, Some(*index)).link);
            replaced = replaced.and(set_port(plugged, *index, plan, link));
        }
        if let Some(link) = link {
            self.links.insert((pf.clone(), *index), *link);
        }
        if let Some(mut planned) = planned {
            planned.keep_slots(self.planned.plan());
            self.planned = Arc::new(planned);
            if mac.is_some() {
                self.warn_of_macs(Some(pf));
            }
        }
        let changed = set_vf::changes(&before, &self.settings(pf, *index));
        let properties = [("id", pf.as_str()), ("index", &index.to_string()), ("by", "host"), ("changed", &changed)];
        self.events.tell(Source::Sriov, "vf-policy", &properties);
        set_vf::settle(replaced, pf, *index)
    }

    /// Effective settings of VF `index` of `pf`, as JSON.
    fn settings(&self, pf: &str, index: u16) -> Map<String, Value> {
        let mut settings = match serde_json::to_value(self.policy(pf, Some(index))) {
            Ok(Value::Object(policy)) => policy,
            _ => Map::new(),
        };
        if let Some(plan) = set_vf::plan_of(&self.planned, pf, index) {
            settings.insert("mac".to_string(), Value::from(MacAddress(plan.spec.mac).to_string()));
        }
        let net = self.config().net.iter().find(|net| net.id.as_deref() == Some(pf));
        let vf = net.and_then(|net| net.vfs.iter().find(|vf| vf.index == index));
        if let Some(Ok(limits)) = vf.and_then(|vf| vf.rate_limiter_config.as_ref()).map(serde_json::to_value) {
            settings.insert("rate_limiter_config".to_string(), limits);
        }
        settings
    }

    /// Restores the VF links that clients set before the VM was saved, for ports of a switch.
    pub(super) fn restore_links(&self) {
        let Some(vm) = &self.vm else { return };
        for ((pf, index), link) in &self.links {
            if let Some((plugged, plan)) = vm.devices().find(pf).zip(set_vf::plan_of(&self.planned, pf, *index)) {
                // The VM is paused: no worker handles a packet.
                drop(set_port(plugged, *index, plan, *link));
            }
        }
    }

    /// Plans the VM after `change`; `None` if the configuration does not change.
    pub(super) fn planned_with_vf(&self, change: &SetVf) -> Result<Option<PlannedVm>, Failure> {
        let SetVf { pf, index, mac, .. } = change;
        let Some(index) = index else { return Ok(None) };
        let mut config = self.config().clone();
        let net = config.net.iter_mut().find(|net| net.id.as_deref() == Some(pf)).ok_or_else(|| no_device(pf))?;
        if !change.apply(net.vf_mut(*index)) {
            return Ok(None);
        }
        let planned = PlannedVm::new(config).map_err(|error| {
            let policy = PolicyConfig { link: change.policy.link, ..PolicyConfig::default() };
            let only_mac = SetVf { pf: pf.clone(), index: Some(*index), policy, mac: *mac, ..SetVf::default() };
            let line = match mac {
                Some(mac) if *change == only_mac => format!("pf={pf},index={index},mac={mac}: {}", error.problem),
                // An API request has no options: name the VF as in other errors of the request.
                _ => error.to_string().trim_start_matches("--net-vf ").to_string(),
            };
            Failure::new(set_vf::kind_of(&error.problem), line)
        })?;
        Ok(Some(planned))
    }
}

/// Applies the plan's settings to a VF that is a port of a switch, except for the link, which clients set.
fn set_port(plugged: &Plugged, index: u16, plan: &NicPlan, link: LinkPolicy) -> Replaced {
    if let BackendPlan::Port(settings) = &plan.backend
        && let Some(switch) = plugged.switch()
    {
        let settings = PortSettings { follows_uplink: link == LinkPolicy::Auto, ..*settings };
        return switch.set_port(switch::port_of(index), settings);
    }
    Replaced::default()
}
