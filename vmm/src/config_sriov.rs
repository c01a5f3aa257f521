//! From a configuration to a plan: everything that was left out is decided, and everything that can be wrong is found, before
//! anything is opened.

use std::net::IpAddr;
use std::os::fd::RawFd;
use std::path::PathBuf;

use crate::config_error::{ConfigError, Problem};
use crate::config_mac::MacAddress;
use crate::config_names::{Names, ids, numbered};
use crate::config_net::{NetConfig, VfConfig};
use crate::config_nic::{Nic, Subject};
use crate::config_value::Options;
use crate::config_vdpa::VdpaConfig;
use crate::config_vhost::{Vhost, VhostMode};

/// Buses that can carry VFs: all of segment 0 but bus 0.
const VF_BUSES: usize = 127;
/// VFs on one bus: all 256 functions of it.
const VFS_PER_BUS: u16 = 256;
/// VFs that a VM has buses for.
const MOST_VFS: u16 = 32_512;
/// Slots of bus 0, without slot 0, which is the host bridge's.
const SLOTS: usize = 31;

/// One device of bus 0: a NIC, or a PF and its VFs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetPlan {
    /// The option that describes it: `--net` or `--vdpa`.
    pub option: &'static str,
    /// The device's name in the VM: what the user gave, or `_net<N>` or `_vdpa<N>`.
    pub id: String,
    /// The device number on bus 0, 1 to 31; `None` for the lowest that is free.
    pub pci_device_id: Option<u8>,
    /// The NIC, or the physical function.
    pub pf: NicPlan,
    /// The virtual functions by index; as many as are reserved, none for a plain NIC.
    pub vfs: Vec<NicPlan>,
}

/// One network function: a plain NIC, a PF or a VF.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NicPlan {
    /// The function's name, from which its threads take theirs: `_net0` or `pf0v3`. Unique in the VM.
    pub id: String,
    /// The MAC address in the guest, unless its backend has one of its own. Unique in the VM.
    pub mac: [u8; 6],
    /// The MTU that the guest is told, 1280 to 65521 bytes.
    pub mtu: Option<u16>,
    /// Pairs of a receive and a transmit queue, 1 or more. The same for all VFs of a PF.
    pub queue_pairs: u16,
    /// The largest size of each queue: a power of two from 2 to 32768.
    pub queue_size: u16,
    /// Whether TCP segmentation is offered in both directions. Implies `offload_csum`.
    pub offload_tso: bool,
    /// Whether UDP segmentation is wanted. Implies `offload_csum`.
    pub offload_ufo: bool,
    /// Whether checksums may be left to the other side.
    pub offload_csum: bool,
    /// Where the packets go.
    pub backend: BackendPlan,
}

/// Where a function's packets go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BackendPlan {
    /// A tap interface of the host. No other function of the VM has it.
    Tap {
        /// Its name, 1 to 15 bytes; `None` for any that is free, of the form `vmtap<N>`.
        name: Option<String>,
        /// The host's address on it; given together with `mask` and of the same family.
        ip: Option<IpAddr>,
        /// The network mask of `ip`.
        mask: Option<IpAddr>,
        /// The interface's own MAC address.
        host_mac: Option<[u8; 6]>,
        /// Whether the host's kernel carries its packets.
        vhost: Vhost,
    },
    /// Taps that were opened before the program started.
    Fds {
        /// One for each pair of queues. Each number is above 2, and no other function of the VM has it.
        fds: Vec<RawFd>,
        /// Whether the host's kernel carries their packets.
        vhost: Vhost,
    },
    /// Another process.
    VhostUser {
        /// The socket to it. No other function of the VM has it.
        socket: PathBuf,
        /// Who listens there.
        mode: VhostMode,
    },
    /// A vDPA device of the host.
    Vdpa {
        /// The device. No other function of the VM has it.
        path: PathBuf,
        /// The MAC address that the user gave; else the device's own counts.
        mac: Option<[u8; 6]>,
    },
}

impl BackendPlan {
    /// Whether others than this process have to map the guest's memory, so that it must be shared.
    pub const fn needs_shared_memory(&self) -> bool {
        matches!(self, Self::VhostUser { .. } | Self::Vdpa { .. })
    }

    /// Whether the host's devices may reach pages of the guest's memory as they are now, so that these must stay its pages.
    pub const fn pins_memory(&self) -> bool {
        matches!(self, Self::Vdpa { .. })
    }

    /// Whether it has a MAC address of its own, which counts where the user gave none.
    pub const fn has_own_mac(&self) -> bool {
        matches!(self, Self::Vdpa { mac: None, .. })
    }
}

impl NetPlan {
    /// The NIC or PF, and the VFs by index.
    pub fn functions(&self) -> impl Iterator<Item = &NicPlan> {
        std::iter::once(&self.pf).chain(&self.vfs)
    }
}

/// Plans the network devices of a VM with `vcpus` vCPUs: first those of `nets`, then those of `vdpas`.
pub(crate) fn plan(nets: &[NetConfig], vdpas: &[VdpaConfig], vcpus: u32) -> Result<Vec<NetPlan>, ConfigError> {
    let made: Vec<_> = vdpas.iter().map(VdpaConfig::to_net).collect();
    let mut pools = Vec::with_capacity(nets.len() + made.len());
    for ((index, config), id) in nets.iter().enumerate().zip(ids(nets)) {
        pools.push(Pool::new("--net", config, id, Subject::net(config, index, nets.len()))?);
    }
    let ids = numbered("_vdpa", vdpas.iter().map(|vdpa| vdpa.id.as_deref()));
    for (((index, vdpa), config), id) in vdpas.iter().enumerate().zip(&made).zip(ids) {
        let subject = Subject::device(VdpaConfig::OPTION, vdpa.id.as_deref(), index, vdpas.len());
        vdpa.check(&subject)?;
        pools.push(Pool::new(VdpaConfig::OPTION, config, id, subject)?);
    }
    check_slots(&pools)?;
    check_buses(&pools)?;
    for pool in &pools {
        pool.check(vcpus)?;
    }
    let names = Names::choose(&pools)?;
    Ok(pools.iter().zip(names).map(|(pool, names)| pool.plan(names)).collect())
}

/// Each device of bus 0 has a slot.
fn check_slots(pools: &[Pool<'_>]) -> Result<(), ConfigError> {
    if pools.len() > SLOTS {
        let what = format!("bus 0 has slots for {SLOTS} devices; give a NIC VFs (sriov_vfs=) in place of more NICs");
        return Err(ConfigError::new(format!("--net ({} of them)", pools.len()), Problem::Limit(what)));
    }
    let mut users: [Option<usize>; SLOTS + 1] = [None; SLOTS + 1];
    for (index, pool) in pools.iter().enumerate() {
        let Some(slot) = pool.config.pci_device_id else { continue };
        let subject = pool.subject.key("pci_device_id", slot);
        let free = users.get_mut(usize::from(slot)).filter(|_| slot != 0);
        match free {
            Some(user @ None) => *user = Some(index),
            Some(Some(user)) => {
                let user = pools
                    .get(*user)
                    .and_then(|pool| pool.config.id.clone())
                    .unwrap_or_else(|| format!("NIC number {}", *user + 1));
                let what = format!("slot {slot}");
                let remedy = "give another, or leave pci_device_id out".to_string();
                return Err(ConfigError::new(subject, Problem::InUse { what, user, remedy }));
            }
            None => {
                let what = format!("bus 0 has slots 1 to {SLOTS} for devices; give one of them");
                return Err(ConfigError::new(subject, Problem::Value(what)));
            }
        }
    }
    Ok(())
}

/// Each PF with VFs has whole buses for them.
fn check_buses(pools: &[Pool<'_>]) -> Result<(), ConfigError> {
    let mut left = VF_BUSES;
    for Pool { config, subject, .. } in pools {
        let subject = || subject.key("sriov_vfs", config.sriov_vfs);
        if config.sriov_vfs > MOST_VFS {
            let what = format!("a VM has buses for {MOST_VFS} VFs; reserve fewer");
            return Err(ConfigError::new(subject(), Problem::Limit(what)));
        }
        let buses = usize::from(config.sriov_vfs.div_ceil(VFS_PER_BUS));
        left = left.checked_sub(buses).ok_or_else(|| {
            let what = format!(
                "needs {buses} of the {VF_BUSES} buses for VFs ({VFS_PER_BUS} on each), and {left} are left; reserve fewer"
            );
            ConfigError::new(subject(), Problem::Limit(what))
        })?;
    }
    Ok(())
}

/// A NIC with all its VFs, also those that the configuration does not mention.
pub(crate) struct Pool<'a> {
    /// The option that describes it: `--net` or `--vdpa`.
    pub option: &'static str,
    pub config: &'a NetConfig,
    /// What the NIC is called, by the user or by number.
    pub id: String,
    pub subject: Subject,
    /// By VF index; `None` for a VF that the configuration leaves as its PF makes it.
    pub vfs: Vec<Option<&'a VfConfig>>,
    /// Queues of each VF.
    vf_queues: u16,
}

impl<'a> Pool<'a> {
    fn new(option: &'static str, config: &'a NetConfig, id: String, subject: Subject) -> Result<Self, ConfigError> {
        let vfs = vec![None; usize::from(config.sriov_vfs)];
        let mut pool = Self { option, config, id, subject, vfs, vf_queues: 2 };
        for vf in &config.vfs {
            let subject = pool.vf_subject(vf.index);
            let name = &pool.id;
            match pool.vfs.get_mut(usize::from(vf.index)) {
                Some(Some(_)) => {
                    let what = format!("VF {} of {name} is given twice; put all its keys into one", vf.index);
                    return Err(ConfigError::new(subject.bare(), Problem::Conflict(what)));
                }
                Some(slot) => *slot = Some(vf),
                None => {
                    let what = match config.sriov_vfs {
                        0 => format!("{name} reserves no VFs; add sriov_vfs= to its --net"),
                        count => {
                            format!("{name} reserves {count} VFs (sriov_vfs={count}); index must be 0 to {}", count - 1)
                        }
                    };
                    return Err(ConfigError::new(subject.bare(), Problem::Value(what)));
                }
            }
        }
        pool.vf_queues = pool.shape()?;
        Ok(pool)
    }

    /// The option that describes a VF.
    pub fn vf_subject(&self, index: u16) -> Subject {
        Subject::vf(&self.id, index)
    }

    /// All VFs, with what the configuration says of them.
    pub fn vfs_by_index(&self) -> impl Iterator<Item = (u16, Option<&'a VfConfig>)> + '_ {
        (0..).zip(self.vfs.iter().copied())
    }

    /// The VFs whose MAC address follows from the PF's.
    pub fn vfs_without_mac(&self) -> impl Iterator<Item = u16> + '_ {
        self.vfs_by_index().filter(|(_, config)| config.is_none_or(|vf| vf.mac.is_none())).map(|(index, _)| index)
    }

    /// The queues of each VF. They are the same for all, as the size of the BARs and of the MSI-X table is.
    fn shape(&self) -> Result<u16, ConfigError> {
        let mut told: Option<(u16, u16)> = None;
        for (vf, queues) in self.config.vfs.iter().filter_map(|vf| vf.num_queues.map(|queues| (vf.index, queues))) {
            match told {
                Some((first, shape)) if shape != queues => {
                    let what = format!(
                        "the VFs of a PF have the same number of queues, and VF {first} has {shape}; make them equal"
                    );
                    return Err(ConfigError::new(
                        self.vf_subject(vf).key("num_queues", queues),
                        Problem::Conflict(what),
                    ));
                }
                _ => told = Some((vf, queues)),
            }
        }
        Ok(told.map_or(2, |(_, shape)| shape))
    }

    fn nic(&self) -> Nic<'a> {
        Nic::net(self.config, self.subject.clone())
    }

    fn vf_nic(&self, vf: &'a VfConfig) -> Nic<'a> {
        Nic::vf(vf, self.config, self.vf_queues, self.vf_subject(vf.index))
    }

    fn check(&self, vcpus: u32) -> Result<(), ConfigError> {
        let Self { config, subject, .. } = self;
        let not_yet = |key: &str, value: String, what: &str| {
            let remedy = format!("leave {key} out");
            Err(ConfigError::new(subject.key(key, value), Problem::NotYet { what: what.to_string(), remedy }))
        };
        if config.iommu {
            return not_yet("iommu", "on".to_string(), "virtual IOMMUs are");
        }
        if config.pci_segment != 0 {
            return not_yet("pci_segment", config.pci_segment.to_string(), "further PCI segments are");
        }
        if config.rate_limiter_config.is_some() {
            return not_yet("rate_limiter_config", "{...}".to_string(), "rate limits are");
        }
        // A vDPA device's queues were counted for the device, and a driver takes as many as it has vCPUs for.
        self.nic().check(if self.option == VdpaConfig::OPTION { u32::MAX } else { vcpus })?;
        config.vfs.iter().try_for_each(|vf| self.vf_nic(vf).check(vcpus))
    }

    fn plan(&self, names: Names) -> NetPlan {
        // What a VF has of which nothing is said.
        let unsaid = VfConfig::default();
        let Names { id, mac, tap, vfs } = names;
        let vfs = self.vfs.iter().zip(vfs).map(|(config, (id, mac, tap))| {
            let nic = Nic::vf(config.unwrap_or(&unsaid), self.config, self.vf_queues, self.subject.clone());
            nic_plan(&nic, id, mac, tap)
        });
        NetPlan {
            option: self.option,
            vfs: vfs.collect(),
            pf: nic_plan(&self.nic(), id.clone(), mac, tap),
            id,
            pci_device_id: self.config.pci_device_id,
        }
    }
}

fn nic_plan(nic: &Nic<'_>, id: String, mac: MacAddress, tap: Option<String>) -> NicPlan {
    NicPlan {
        id,
        mac: mac.0,
        mtu: nic.mtu,
        queue_pairs: nic.queue_pairs(),
        queue_size: nic.queue_size,
        offload_tso: nic.tso,
        offload_ufo: nic.ufo,
        offload_csum: nic.csum,
        backend: nic.backend(tap),
    }
}
