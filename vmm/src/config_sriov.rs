//! NICs, PFs and VFs: from their configuration to a plan.
//!
//! Every value that was left out is chosen, and every mistake in the configuration is found, before anything is opened.

use std::collections::HashMap;

use pci::Capacity;
use virtio_devices::NetSpec;

use crate::config::capacity::{CAPACITY, check_slot};
use crate::config::names::{Name, Names};
use crate::config::net::backend::{BackendPlan, MissingBackend};
use crate::config::net::policy;
use crate::config::net::pool::Pool;
use crate::config::net::switch::SwitchPlan;
use crate::config::net::vf_ranges;
use crate::config::net::x550::{self, X550Plan};
use crate::config::rate;
use crate::config::root_buses::RootBuses;
use crate::config::segments;
use crate::config::subject::Subject;
use crate::pci_layout::RootBus;
use vm_api::config::VmConfig;
use vm_api::config::error::{ConfigError, Problem};
use vm_api::config::kinds::Ids;
use vm_api::config::mac::MacAddress;
use vm_api::config::net::NetConfig;
use vm_api::config::option::Options as _;
use vm_api::config::vdpa::VdpaConfig;

/// The functions of a NIC, or of a PF and its VFs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetPlan {
    /// The NIC or PF.
    pub pf: NicPlan,
    /// The VFs by index, all that are reserved. A plain NIC has none.
    pub vfs: Vec<NicPlan>,
    /// The switch that connects the PF with the VFs that are its ports.
    pub switch: Option<SwitchPlan>,
    /// The further root bus of segment 0 that it is on, if it is on one.
    pub root: Option<RootBus>,
}

/// A NIC of any model.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::large_enum_variant, reason = "most NICs are virtio NICs, and each is unpacked at once")]
pub(crate) enum AnyNic {
    /// A virtio NIC, or a PF with its VFs.
    Virtio(NetPlan),
    /// An Intel X550.
    X550(X550Plan),
}

/// Network function: a plain NIC, a PF or a VF.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NicPlan {
    /// The device. Its id and MAC address are unique in the VM, and all VFs of a PF have the same number of queue
    /// pairs. A backend with a MAC address of its own overrides the one here.
    pub spec: NetSpec,
    /// The backend to open for it.
    pub backend: BackendPlan,
    /// Action if the backend is missing.
    pub missing: MissingBackend,
}

impl NetPlan {
    /// The device's name in the VM: the user's, or `_net<N>` or `_vdpa<N>`.
    pub fn id(&self) -> &str {
        &self.pf.spec.id
    }

    /// The NIC or PF, then the VFs by index.
    pub fn functions(&self) -> impl Iterator<Item = &NicPlan> {
        std::iter::once(&self.pf).chain(&self.vfs)
    }

    /// As [`Self::functions`], mutable.
    pub(crate) fn functions_mut(&mut self) -> impl Iterator<Item = &mut NicPlan> {
        std::iter::once(&mut self.pf).chain(&mut self.vfs)
    }

    fn new(pool: &Pool<'_>, names: Names, root: Option<RootBus>) -> Self {
        // A NIC always has an address of its own. A VF's address may follow from its PF's, but not from an address that
        // only the PF's device knows: then the configuration stores the VF's, as if it had been given. On a switch,
        // too, it counts as given: with another address, the VF would receive frames for others.
        let pf = NicPlan::new(pool.pf, Some(names.pf.mac), names.pf);
        let is_kept = pf.backend.has_own_mac();
        let given = |config: &NetConfig, name: &Name| match config.mac {
            Some(choice) => choice.given(),
            None => (is_kept || config.port().is_some()).then_some(name.mac),
        };
        let vfs = pool.vfs.iter().zip(names.vfs);
        let vfs = vfs.map(|(config, name)| NicPlan::new(config, given(config, &name), name)).collect();
        Self { pf, vfs, switch: SwitchPlan::of(pool.pf), root }
    }
}

impl AnyNic {
    fn new(pool: &Pool<'_>, names: Names, root: Option<RootBus>) -> Self {
        if let Some(model) = x550::model(pool.pf) {
            return Self::X550(X550Plan { root, ..X550Plan::new(model, pool.pf, names.pf.id, names.pf.mac) });
        }
        Self::Virtio(NetPlan::new(pool, names, root))
    }

    /// The device's name in the VM: the user's, or one with its number.
    pub(crate) fn id(&self) -> &str {
        match self {
            Self::Virtio(net) => net.id(),
            Self::X550(x550) => &x550.id,
        }
    }
}

impl NicPlan {
    /// Takes over the state of a missing backend if this function has the same backend.
    pub(crate) fn keep_missing(&mut self, before: &Self) {
        let is_same = self.backend == before.backend || before.awaits_descriptors();
        if before.missing != MissingBackend::Refused && is_same {
            (self.missing, self.backend) = (before.missing.clone(), before.backend.clone());
        }
    }

    /// True if its backend is taps through descriptors that have not been given yet.
    pub(crate) fn awaits_descriptors(&self) -> bool {
        matches!(&self.backend, BackendPlan::Fds { fds, .. } if fds.is_empty())
    }

    fn new(config: &NetConfig, given: Option<MacAddress>, name: Name) -> Self {
        let spec = NetSpec {
            id: name.id,
            mac: name.mac.0,
            mtu: config.mtu,
            queue_pairs: config.num_queues / 2,
            queue_size: config.queue_size,
            offload_tso: config.offload_tso,
            offload_ufo: config.offload_ufo,
            offload_csum: config.offload_csum,
            standby: config.standby,
            limits: config.rate_limiter_config.as_ref().map(rate::limits_of).unwrap_or_default(),
            policy: policy::policy_of(config, given),
            link_up: policy::link_up(config),
            follows_tap: policy::follows_tap(config),
        };
        Self { backend: BackendPlan::of(config, &spec, name.tap), spec, missing: MissingBackend::Refused }
    }
}

/// The configuration with settings for each VF in place of those for ranges of VFs; `None` if there are no ranges.
pub(crate) fn expanded(config: &VmConfig) -> Result<Option<VmConfig>, ConfigError> {
    x550::check_vfs(&config.net, &config.ids())?;
    if !vf_ranges::has_any(config) {
        return Ok(None);
    }
    // A client can ask for any number of PFs and VFs.
    check_buses(&config.net, &RootBuses::default())?;
    vf_ranges::expanded(config).map(Some)
}

/// Plans the network devices of a VM with `vcpus` vCPUs, this number of PCI segments and these further root buses:
/// first those of `nets`, then those of `vdpas`.
pub(crate) fn plan(
    nets: &[NetConfig],
    vdpas: &[VdpaConfig],
    ids: &Ids,
    vcpus: u32,
    (segments, roots): (u16, &RootBuses),
) -> Result<Vec<AnyNic>, ConfigError> {
    // Checks that limit the number of functions come first: a client can ask for any number of PFs and VFs.
    check_segments(nets, segments)?;
    let on_vdpa = vdpas.iter().map(|vdpa| (vdpa.pci_segment, 0));
    check_count(nets.iter().map(|net| (net.pci_segment, roots.bus_of(net))).chain(on_vdpa))?;
    check_buses(nets, roots)?;
    let made: Vec<_> = vdpas.iter().map(VdpaConfig::to_net).collect();
    let mut pools = Vec::with_capacity(nets.len() + made.len());
    for ((index, net), id) in nets.iter().enumerate().zip(ids.of::<NetConfig>()) {
        let subject = Subject::device("--net", net.id.as_deref(), index, nets.len());
        pools.push(Pool::new("--net", net, id, subject)?);
    }
    for (((index, vdpa), net), id) in vdpas.iter().enumerate().zip(&made).zip(ids.of::<VdpaConfig>()) {
        let subject = Subject::device(VdpaConfig::OPTION, vdpa.id.as_deref(), index, vdpas.len());
        check_vdpa(vdpa, &subject)?;
        pools.push(Pool::new(VdpaConfig::OPTION, net, id, subject)?);
    }
    check_slots(&pools, roots)?;
    for pool in &pools {
        pool.check(vcpus)?;
    }
    let names = Names::choose(&pools)?;
    Ok(pools.iter().zip(names).map(|(pool, names)| AnyNic::new(pool, names, roots.of(pool.pf))).collect())
}

/// Checks settings that a vDPA device loses when it becomes a NIC.
fn check_vdpa(vdpa: &VdpaConfig, subject: &Subject) -> Result<(), ConfigError> {
    if vdpa.path.as_os_str().is_empty() {
        let what = "the path is empty; give the device, such as /dev/vhost-vdpa-0".to_string();
        return Err(ConfigError::new(subject.key("path", ""), Problem::Value(what)));
    }
    if vdpa.num_queues == 0 {
        let what = "a NIC needs queues; give 1 or more, or leave num_queues out".to_string();
        return Err(ConfigError::new(subject.key("num_queues", 0), Problem::Value(what)));
    }
    Ok(())
}

/// Checks that each NIC's segment exists, and has buses if the NIC is a PF.
fn check_segments(nets: &[NetConfig], segments: u16) -> Result<(), ConfigError> {
    nets.iter().enumerate().try_for_each(|(index, net)| {
        let subject = || Subject::device("--net", net.id.as_deref(), index, nets.len());
        segments::check(|key, value| subject().key(key, value), net.pci_segment, net.sriov_vfs, segments)
    })
}

/// Checks that each root bus has a slot for each device; `devices` are the devices' segments and root buses.
fn check_count(devices: impl Iterator<Item = (u16, u8)>) -> Result<(), ConfigError> {
    let slots = Capacity::SLOTS.count();
    let mut counts = HashMap::<_, usize>::new();
    for root in devices {
        *counts.entry(root).or_default() += 1;
    }
    if let Some(((_, bus), count)) = counts.into_iter().find(|(_, count)| *count > slots) {
        let what = format!("bus {bus} has slots for {slots} devices; use VFs (sriov_vfs=) instead of more NICs");
        return Err(ConfigError::new(format!("--net ({count} of them)"), Problem::Limit(what)));
    }
    Ok(())
}

/// Checks that no two devices request the same slot of a root bus.
fn check_slots(pools: &[Pool<'_>], roots: &RootBuses) -> Result<(), ConfigError> {
    let mut users = HashMap::new();
    for pool in pools {
        let Some(slot) = pool.pf.pci_device_id else { continue };
        let subject = pool.subject(None);
        let root = (pool.pf.pci_segment, roots.bus_of(pool.pf));
        check_slot(root, slot, &subject)?;
        if let Some(user) = users.insert((root, slot), &pool.id) {
            let (what, user) = (format!("slot {slot}"), user.clone());
            let remedy = "give another, or leave pci_device_id out".to_string();
            return Err(ConfigError::new(subject.key("pci_device_id", slot), Problem::InUse { what, user, remedy }));
        }
    }
    Ok(())
}

/// Checks that there are buses for the VFs of all PFs, whole ones for each.
fn check_buses(nets: &[NetConfig], roots: &RootBuses) -> Result<(), ConfigError> {
    let most = CAPACITY.vfs();
    let mut taken = HashMap::<_, u16>::new();
    for (index, net) in nets.iter().enumerate() {
        let vfs = net.sriov_vfs;
        let subject = Subject::device("--net", net.id.as_deref(), index, nets.len());
        let fail = |what| ConfigError::new(subject.key("sriov_vfs", vfs), Problem::Limit(what));
        if vfs > most {
            return Err(fail(format!("a VM has buses for {most} VFs; reserve fewer")));
        }
        let needed = Capacity::buses_for(vfs);
        let (owner, buses) = roots.vf_buses_of(net);
        let taken = taken.entry(roots.bus_of(net)).or_default();
        let left = buses.saturating_sub(*taken);
        if needed > left {
            return Err(fail(format!(
                "takes {needed} of {owner}'s {buses} buses for VFs, but {left} are free; reserve fewer"
            )));
        }
        *taken += needed;
    }
    Ok(())
}
