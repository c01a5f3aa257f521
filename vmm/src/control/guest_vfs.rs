//! VFs that the guest governs: its settings for them, and what the host says about them.

use std::collections::HashMap;
use std::time::Instant;

use pci::VfIndex;
use virtio_devices::BackendKind;
use vm_api::config::net::guest_control::{GuestControl, GuestSettings};

use crate::config::net::guest_control::{self, HostVf};
use crate::config::net::policy;
use crate::config::{LinkPolicy, MacAddress, NetConfig, NicPlan, PlannedVm, VfConfig};
use crate::control::guest_reports::GuestReports;
use crate::control::in_force::{InForce, NewMac, put_in_force};
use crate::control::set_vf;
use crate::devices::Plugged;
use crate::machine_state::GuestVfState;
use crate::vm::Vm;

/// Settings of the guest for all its VFs.
pub(crate) struct GuestVfs {
    /// By PF and index.
    pub vfs: HashMap<(String, u16), GuestVf>,
    /// Reports of changes.
    pub reports: GuestReports,
}

/// Settings of the guest for one VF.
pub(crate) struct GuestVf {
    /// The settings.
    pub settings: GuestSettings,
    /// Number of the VF's conventional resets when they were made.
    pub resets: u64,
}

impl GuestVfs {
    /// None yet.
    pub(crate) fn new() -> Self {
        Self { vfs: HashMap::new(), reports: GuestReports::new(Instant::now()) }
    }

    /// Forgets all settings: the devices are others.
    pub(crate) fn clear(&mut self) {
        self.vfs.clear();
    }

    /// Forgets the settings for VFs of `pf`, which was removed.
    pub(crate) fn forget(&mut self, pf: &str) {
        self.vfs.retain(|(id, _), _| id != pf);
    }
}

/// A VF of a PF with `guest_control`, as the host has it.
pub(crate) struct HostSide<'p> {
    /// Settings that the guest may make.
    pub allowed: &'p GuestControl,
    /// The PF.
    pub net: &'p NetConfig,
    /// Plan of the VF.
    pub plan: &'p NicPlan,
    /// Settings of the VF.
    pub config: NetConfig,
    /// Link of the VF.
    pub link: LinkPolicy,
    /// Kind of its open backend.
    pub backend: BackendKind,
}

impl<'p> HostSide<'p> {
    /// The VF `index` of `pf` in `planned`, whose host has set `link`; `None` if the guest may not govern it.
    pub(crate) fn of(
        planned: &'p PlannedVm,
        (pf, index): (&str, u16),
        link: LinkPolicy,
        backend: BackendKind,
    ) -> Option<Self> {
        let net = planned.config().net.iter().find(|net| net.id.as_deref() == Some(pf))?;
        let allowed = net.guest_control.as_ref()?;
        let plan = set_vf::plan_of(planned, pf, index)?;
        Some(Self { allowed, net, plan, config: config_of(net, index), link, backend })
    }

    /// As [`guest_control::decide`] takes it.
    pub(crate) fn host(&self) -> HostVf<'_> {
        HostVf { config: &self.config, link: self.link, backend: self.backend, pf: self.net }
    }
}

/// The host's settings of VF `index` of `net`.
pub(crate) fn config_of(net: &NetConfig, index: u16) -> NetConfig {
    let unsaid = VfConfig::default();
    net.vf(index).unwrap_or(&unsaid).over(net, net.num_queues)
}

/// The plan of a VF with the settings `guest`, which make `config` of the host's.
pub(crate) fn nic_of(host: &NicPlan, config: &NetConfig, guest: &GuestSettings) -> NicPlan {
    let mut nic = host.clone();
    if !guest.is_empty() {
        let given = guest.mac.or(host.spec.policy.address.map(MacAddress));
        nic.spec.policy = policy::policy_of(config, given);
        nic.spec.mac = guest.mac.map_or(host.spec.mac, |mac| mac.0);
    }
    nic
}

/// True if `mac` is the address of another function of the VM than VF `index` of `pf`.
pub(crate) fn is_planned(planned: &PlannedVm, mac: MacAddress, (pf, index): (&str, u16)) -> bool {
    let devices = &planned.plan().devices;
    if devices.iter().filter_map(|device| device.x550()).any(|x550| x550.mac == mac) {
        return true;
    }
    planned.plan().nets().any(|net| {
        let own = if net.id() == pf { Some(1 + usize::from(index)) } else { None };
        let mut functions = net.functions().enumerate();
        functions.any(|(number, nic)| Some(number) != own && nic.spec.mac == mac.0)
    })
}

/// The number of conventional resets of VF `index`, if it exists.
pub(crate) fn resets_of(plugged: &Plugged, index: u16) -> Option<u64> {
    let status = plugged.slot().with(|device| device.function_status(Some(VfIndex(index)))).flatten();
    status.filter(|status| status.exists).map(|status| status.conventional_resets)
}

/// Kind of the open backend of VF `index`.
pub(crate) fn backend_of(plugged: &Plugged, index: u16) -> BackendKind {
    let kind = plugged.slot().with(|device| Some(device.host_nic(Some(VfIndex(index)))?.backend_kind()));
    kind.flatten().unwrap_or(BackendKind::Absent)
}

/// Gives the devices of `vm` the settings that the guest had made when it was saved, so that their saved states fit.
/// The instance decides on them afterwards.
pub(crate) fn prepare(vm: &Vm, planned: &PlannedVm, saved: &[GuestVfState]) {
    for GuestVfState { id, vf, settings } in saved.iter().filter(|saved| saved.settings.are_possible()) {
        let net = planned.config().net.iter().find(|net| net.id.as_deref() == Some(id));
        let found = net.zip(vm.devices().find(id)).zip(set_vf::plan_of(planned, id, *vf));
        let Some(((net, plugged), plan)) = found else { continue };
        let config = config_of(net, *vf);
        let link = config.policy.link.unwrap_or_default();
        let nic = nic_of(plan, &guest_control::effective(&config, link, settings), settings);
        let mac = settings.mac.map_or(NewMac::Stays, |mac| NewMac::OfGuest(mac.0));
        let new = InForce {
            vf: (id, *vf),
            policy: Some(&nic),
            port: None,
            mac,
            link: None,
            port_link: link,
            host: None,
            resets: None,
        };
        if let Err(failure) = put_in_force(plugged, &new) {
            log::warn!("{}", failure.chain.join(": "));
        }
    }
}
