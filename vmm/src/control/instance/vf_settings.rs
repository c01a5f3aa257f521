//! Changing a VF's settings with `vm.set-vf`.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use pci::VfIndex;
use serde_json::{Map, Value};
use virtio_devices::Replaced;

use super::guest_settings::Governed;
use super::{Instance, no_device};
use crate::api::info::PolicyInfo;
use crate::api::{Failure, SetVf};
use crate::config::net::vf_ranges;
use crate::config::subject::Subject;
use crate::config::{LinkPolicy, MacAddress, MacChoice, NicPlan, PlannedVm, PolicyConfig, Problem, VfRange};
use crate::control::in_force::{self, InForce, NewMac, host_settings, no_vf, put_in_force};
use crate::control::set_vf;
use crate::devices::Plugged;
use crate::error_kind::ErrorKind;
use crate::telemetry::events::Source;
use vm_api::config::net::guest_control::GuestSettings;

impl Instance {
    /// Changes a VF's link, MAC address and policy, or the link and policy of several VFs, and their configuration
    /// except for the link. Restrictions are in effect on success.
    ///
    /// # Errors
    ///
    /// Fails without a change if there is no such VF, another function has the address, a driver already uses the VF,
    /// or the request cannot be enforced. Fails after the change if a worker still handles packets from before it after
    /// 5 s; the change applies to all other packets.
    pub(crate) fn set_vf(&mut self, change: &SetVf, fds: Vec<OwnedFd>) -> Result<(), Failure> {
        self.check_owner(change)?;
        self.end_stale_guest_settings();
        let numbers: Vec<_> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        if let Some(backend) = change.backend(&numbers) {
            return self.connect(change, &backend, fds);
        }
        let SetVf { pf, index, policy: PolicyConfig { link, .. }, mac, .. } = change;
        let Some(index) = *index else {
            let what = "give the index of a VF; only a backend can be given to the NIC itself";
            return Err(Failure::new(ErrorKind::Invalid, format!("pf={pf}: {what}")));
        };
        let vm = self.vm.as_ref().ok_or_else(|| {
            Failure::new(ErrorKind::Conflict, "the VM is not booted; give the VF's settings in vm.create or vm.add-net")
        })?;
        let plugged = vm.devices().find(pf).ok_or_else(|| no_device(pf))?;
        let no_vf = |what| Failure::new(ErrorKind::NotFound, format!("pf={pf},index={index}: {what}"));
        let indices = index.among(pf, plugged.plan().total_vfs()).map_err(no_vf)?;
        let planned = self.planned_with_vf(change)?;
        let before: Vec<_> = indices.clone().map(|index| self.settings(pf, index)).collect();
        let governed = self.governed_after(plugged, planned.as_ref(), (indices.clone(), *link));
        let plans = VfPlans { change, now: &self.planned, planned: planned.as_ref(), governed };
        for index in indices.clone() {
            plans.check(plugged, index)?;
        }
        let mut replaced = Replaced::default();
        for index in indices.clone() {
            let port_link = link.unwrap_or_else(|| self.host_link(pf, index));
            replaced = replaced.and(plans.apply(plugged, index, port_link)?);
        }
        let governed = plans.governed;
        if let Some(link) = link {
            self.links.extend(indices.clone().map(|index| ((pf.clone(), index), *link)));
        }
        for (index, governed) in governed {
            self.keep_guest_settings(pf, index, governed.remaining);
        }
        if let Some(mut planned) = planned {
            planned.keep_slots(self.planned.plan());
            self.planned = Arc::new(planned);
            if mac.is_some() {
                self.warn_of_macs(Some(pf));
            }
        }
        for (range, changed) in self.changed(pf, indices.zip(&before)) {
            let properties =
                [("id", pf.as_str()), ("index", &range.to_string()), ("by", "host"), ("changed", &changed)];
            self.events.tell(Source::Sriov, "vf-policy", &properties);
            self.notify_guest_of(pf, range.among(pf, u16::MAX).unwrap_or(0..=0), ("host", &changed));
        }
        if let Some(mac) = mac.and_then(MacChoice::given) {
            self.decide_again(|_, settings| settings.mac == Some(mac));
        }
        set_vf::settle(replaced, pf, index)
    }

    /// Checks that the VFs of `change` are the host's.
    ///
    /// # Errors
    ///
    /// Fails for those of an X550.
    pub(super) fn check_owner(&self, change: &SetVf) -> Result<(), Failure> {
        let SetVf { pf, index, .. } = change;
        let devices = &self.planned.plan().devices;
        let Some(x550) = devices.iter().filter_map(|device| device.x550()).find(|x550| x550.id == *pf) else {
            return Ok(());
        };
        let index = index.map(|index| format!(",index={index}")).unwrap_or_default();
        let what = format!(
            "the guest owns the functions of an {} and sets their policies (ip link set <PF> vf); restrict the NIC's \
             uplink on the host (docs/guide/x550.md)",
            x550.model
        );
        Err(Failure::new(ErrorKind::Conflict, format!("pf={pf}{index}: {what}")))
    }

    /// Returns the changes since these settings. VFs one after another with the same change are together.
    fn changed<'s>(
        &self,
        pf: &str,
        before: impl Iterator<Item = (u16, &'s Map<String, Value>)>,
    ) -> Vec<(VfRange, String)> {
        let mut ranges: Vec<(VfRange, String)> = Vec::new();
        for (index, before) in before {
            let changed = set_vf::changes(before, &self.settings(pf, index));
            match ranges.last_mut() {
                Some((range, same)) if *same == changed => *range = range.with(index),
                _ => ranges.push((index.into(), changed)),
            }
        }
        ranges
    }

    /// Effective settings of VF `index` of `pf`, as JSON.
    pub(super) fn settings(&self, pf: &str, index: u16) -> Map<String, Value> {
        self.settings_with(pf, index, &self.guest_settings(pf, index))
    }

    /// Effective settings of VF `index` of `pf` with `guest` as the guest's own, as JSON.
    pub(super) fn settings_with(&self, pf: &str, index: u16, guest: &GuestSettings) -> Map<String, Value> {
        let policy = set_vf::policy_of(self.config(), pf, Some(index), Some(self.host_link(pf, index)), guest);
        let mut settings = match serde_json::to_value(PolicyInfo { guest_set: Vec::new(), ..policy }) {
            Ok(Value::Object(policy)) => policy,
            _ => Map::new(),
        };
        let mac = guest.mac.or_else(|| Some(MacAddress(set_vf::plan_of(&self.planned, pf, index)?.spec.mac)));
        if let Some(mac) = mac {
            settings.insert("mac".to_string(), Value::from(mac.to_string()));
        }
        let net = self.config().net.iter().find(|net| net.id.as_deref() == Some(pf));
        let vf = net.and_then(|net| net.vf(index));
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
                drop(in_force::set_port(plugged, *index, plan, *link));
            }
        }
    }

    /// Plans the VM after `change`; `None` if the configuration does not change.
    pub(super) fn planned_with_vf(&self, change: &SetVf) -> Result<Option<PlannedVm>, Failure> {
        let SetVf { pf, index, mac, .. } = change;
        let Some(index) = *index else { return Ok(None) };
        let mut config = self.config().clone();
        let net = config.net.iter_mut().find(|net| net.id.as_deref() == Some(pf)).ok_or_else(|| no_device(pf))?;
        let fail = |kind, what: String| Failure::new(kind, format!("pf={pf},index={index}: {what}"));
        let indices = index.among(pf, net.sriov_vfs).map_err(|what| fail(ErrorKind::NotFound, what))?;
        if index.one().is_none() {
            if mac.is_some() {
                let what = "mac belongs to one VF, and this index is several; give mac with the index of one";
                return Err(fail(ErrorKind::Invalid, what.to_string()));
            }
            vf_ranges::check_trunk(&change.policy, indices.len()).map_err(|what| fail(ErrorKind::Invalid, what))?;
        }
        let mut is_changed = false;
        for vf in net.vfs_mut(indices) {
            is_changed |= change.apply(vf);
        }
        if !is_changed {
            return Ok(None);
        }
        let planned = PlannedVm::new(config).map_err(|error| {
            if let Some(line) = self.address_in_use(change, &error.problem) {
                return fail(set_vf::kind_of(&error.problem), line);
            }
            let policy = PolicyConfig { link: change.policy.link, ..PolicyConfig::default() };
            let only_mac = SetVf { pf: pf.clone(), index: Some(index), policy, mac: *mac, ..SetVf::default() };
            let line = match mac {
                Some(mac) if *change == only_mac => format!("pf={pf},index={index},mac={mac}: {}", error.problem),
                // An API request has no options: name the VF as in other errors of the request.
                _ => error.to_string().trim_start_matches("--net-vf ").to_string(),
            };
            Failure::new(set_vf::kind_of(&error.problem), line)
        })?;
        Ok(Some(planned))
    }

    /// The line for an address of `change` that another function of the PF has. The plan's own would name the function
    /// of higher index.
    fn address_in_use(&self, change: &SetVf, problem: &Problem) -> Option<String> {
        let mac = change.mac.and_then(MacChoice::given).filter(|_| matches!(problem, Problem::InUse { .. }))?;
        let net = self.planned.plan().nets().find(|net| net.id() == change.pf)?;
        let has = |plan: &NicPlan| plan.spec.mac == mac.0;
        let user = match net.vfs.iter().position(has) {
            Some(index) => format!("VF {index} of {}", change.pf),
            None => Some(&net.pf).filter(|pf| has(pf)).map(|_| change.pf.clone())?,
        };
        Some(format!("MAC address {mac} is already in use by {user}; give another"))
    }
}

/// A change of VFs of a PF, with their plans before and after it. Each call takes the device's lock, which vCPUs take,
/// for one VF alone.
pub(super) struct VfPlans<'a> {
    pub change: &'a SetVf,
    pub now: &'a PlannedVm,
    /// `None` if the configuration does not change.
    pub planned: Option<&'a PlannedVm>,
    /// The VFs among them for which the guest has made settings.
    pub governed: HashMap<u16, Governed>,
}

impl VfPlans<'_> {
    /// The plan of VF `index` after the change.
    fn of(&self, index: u16) -> Option<&NicPlan> {
        set_vf::plan_of(self.planned.unwrap_or(self.now), &self.change.pf, index)
    }

    /// Checks that the open backend of VF `index` can enforce the change.
    fn check(&self, plugged: &Plugged, index: u16) -> Result<(), Failure> {
        let kind = plugged.slot().with(|device| Some(device.host_nic(Some(VfIndex(index)))?.backend_kind()));
        let kind = kind.flatten().ok_or_else(|| no_vf(&self.change.pf, index))?;
        let Some(planned) = self.planned else { return Ok(()) };
        let plan = set_vf::plan_of(planned, &self.change.pf, index).ok_or_else(|| no_vf(&self.change.pf, index))?;
        set_vf::check_enforced(plan, kind, &Subject::requested_vf(&self.change.pf, index))
    }

    /// Changes VF `index`, whose host has set `link`. Only a MAC address, which one VF alone is given, can be refused.
    pub(super) fn apply(&self, plugged: &Plugged, index: u16, link: LinkPolicy) -> Result<Replaced, Failure> {
        let SetVf { pf, mac, policy, .. } = self.change;
        let planned = self.planned.and_then(|planned| set_vf::plan_of(planned, pf, index));
        let now = set_vf::plan_of(self.now, pf, index);
        let of_host = || {
            let mac = match mac.and(now.zip(planned)) {
                Some(plans) => NewMac::OfHost(self.change, plans),
                None => NewMac::Stays,
            };
            put_in_force(
                plugged,
                &InForce {
                    vf: (pf, index),
                    policy: planned,
                    port: self.of(index),
                    mac,
                    link: policy.link,
                    port_link: link,
                    host: None,
                    resets: None,
                },
            )
        };
        let Some(governed) = self.governed.get(&index) else { return of_host() };
        let Governed { before, nic, link: effective, remaining, resets, .. } = governed;
        let mac = match mac {
            Some(_) if planned.is_some() => NewMac::OfHost(self.change, (before, nic)),
            _ if before.spec.mac != nic.spec.mac => NewMac::OfGuest(nic.spec.mac),
            _ => NewMac::Stays,
        };
        let host = self.of(index).filter(|_| !remaining.is_empty()).map(|plan| host_settings(plan, link));
        let with_guest = put_in_force(
            plugged,
            &InForce {
                vf: (pf, index),
                policy: Some(nic),
                port: Some(nic),
                mac,
                link: Some(*effective),
                port_link: *effective,
                host,
                resets: *resets,
            },
        );
        // The guest has disabled the VF since, which ended its settings.
        if with_guest.as_ref().is_err_and(|failure| failure.kind == ErrorKind::NotFound) {
            of_host()
        } else {
            with_guest
        }
    }
}
