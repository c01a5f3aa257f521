//! From a plan to devices in their slots: the one place that knows both.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use pci::{HostBridge, Placement, Topology, TopologyError, ecam_read, ecam_write};
use virtio_devices::{
    FunctionError, Memory, Net, NetError, NetSpec, NetSriov, NetSriovError, Tap, TapError, TapSpec, VirtioFunction,
    VirtioPci,
};

use crate::arch::x86_64::layout;
use crate::config::{BackendPlan, NetPlan, NicPlan};
use crate::cpu::MmioHandler;
use crate::firmware::{Apertures, NoRoom, place_bars};
use crate::kvm::Vm;
use crate::slot::{Machine, Slot};

/// The host bridge that guests of Cloud Hypervisor see.
const HOST_BRIDGE: HostBridge = HostBridge::new(0x8086, 0x0d57);

/// Why a device cannot be. `option` is how the user named it: `--net id=pf0` or `--net-vf pf=pf0,index=3`.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Its tap cannot be used.
    #[error("{option}: {error}")]
    Tap {
        /// The network function.
        option: String,
        /// Why.
        error: TapError,
    },
    /// A file descriptor passed in is not open.
    #[error("{option},fd={fd}: there is no such open file descriptor; open the tap before starting the VMM")]
    Fd {
        /// The network function.
        option: String,
        /// The file descriptor.
        fd: i32,
    },
    /// The network function cannot be.
    #[error("{option}: {error}")]
    Net {
        /// The network function.
        option: String,
        /// Why.
        error: NetError,
    },
    /// The device cannot be a PCI function.
    #[error("{option}: {error}")]
    Function {
        /// The device.
        option: String,
        /// Why.
        error: FunctionError,
    },
    /// The devices cannot be a PF and its VFs.
    #[error("{option}: {error}")]
    Sriov {
        /// The PF.
        option: String,
        /// Why.
        error: NetSriovError,
    },
    /// There is no place for the device.
    #[error("{option}: {error}")]
    Place {
        /// The device.
        option: String,
        /// Why.
        error: TopologyError,
    },
    /// The host does not give the addresses for pages of configuration space.
    #[error("{option}: cannot reserve addresses for its configuration space: {error}")]
    Pages {
        /// The device.
        option: String,
        /// Why.
        error: io::Error,
    },
    /// The BARs do not fit.
    #[error(transparent)]
    NoRoom(#[from] NoRoom),
}

/// The devices of a machine. They outlive the KVM VMs that a guest's reboots make of it.
pub struct Devices {
    machine: Arc<Machine>,
    topology: Topology<Arc<Slot>>,
    apertures: Apertures,
}

impl Devices {
    /// Opens what the plans name and makes devices of it. `memory` is the guest's.
    ///
    /// # Errors
    ///
    /// When something cannot be opened or be a device. What was opened or created until then is closed and gone.
    pub fn new(plans: &[NetPlan], memory: &Memory, apertures: Apertures) -> Result<Self, Error> {
        let machine = Arc::new(Machine::default());
        let mut topology = Topology::new(layout::LAST_BUS);
        let mut plug = |slot, total_vfs, option: &str, device: &mut dyn FnMut(Placement) -> BoxResult| {
            let place = |error| Error::Place { option: option.to_string(), error };
            let placement = topology.place(slot, total_vfs).map_err(place)?;
            let slot = Slot::new(device(placement)?, placement, Arc::clone(&machine))
                .map_err(|error| Error::Pages { option: option.to_string(), error })?;
            topology.plug(placement, slot).map_err(place)
        };
        plug(Some(0), 0, "host bridge", &mut |_| Ok(Box::new(HOST_BRIDGE)))?;
        // In the order of the configuration, so that the buses of VFs do not depend on who chose a slot.
        for (plan, slot) in plans.iter().zip(slots(plans)) {
            let total_vfs = u16::try_from(plan.vfs.len()).unwrap_or(u16::MAX);
            plug(slot, total_vfs, &option(plan), &mut |placement| open(plan, placement, memory))?;
        }
        Ok(Self { machine, topology, apertures })
    }

    /// Wires the devices to `vm`, in their state of power-on and with addresses in their BARs.
    ///
    /// # Errors
    ///
    /// When the BARs need more addresses than there are.
    pub fn attach(&self, vm: Arc<Vm>) -> Result<(), Error> {
        self.machine.set_wiring(Some(Box::new(vm)));
        Ok(place_bars(&self.topology, self.apertures.clone())?)
    }

    /// Resets the devices, so that none of them touches the guest's memory any more, and parts them from their VM. Its vCPUs
    /// must not run any more.
    pub fn detach(&self) {
        for (_, slot) in self.topology.iter() {
            slot.reset();
        }
        self.machine.set_wiring(None);
        for (_, slot) in self.topology.iter() {
            slot.forget_wiring();
        }
    }
}

/// The slot of each device: that which was chosen, or the lowest from 1 that nobody chose. `None` if there are no more.
fn slots(plans: &[NetPlan]) -> Vec<Option<u8>> {
    let mut free = (1..32).filter(|slot| plans.iter().all(|plan| plan.pci_device_id != Some(*slot)));
    plans.iter().map(|plan| plan.pci_device_id.or_else(|| free.next())).collect()
}

type BoxResult = Result<Box<dyn VirtioPci>, Error>;

fn option(plan: &NetPlan) -> String {
    format!("--net id={}", plan.id)
}

/// Opens what `plan` names and makes a device of it.
fn open(plan: &NetPlan, placement: Placement, memory: &Memory) -> BoxResult {
    let pf = nic(&plan.pf, &option(plan))?;
    if plan.vfs.is_empty() {
        let function = VirtioFunction::plain(pf, placement.rid, memory.clone());
        return Ok(Box::new(function.map_err(|error| Error::Function { option: option(plan), error })?));
    }
    let vf = |(index, vf)| nic(vf, &format!("--net-vf pf={},index={index}", plan.id));
    let vfs = plan.vfs.iter().enumerate().map(vf).collect::<Result<_, _>>()?;
    let device = NetSriov::new(pf, vfs, placement, memory);
    Ok(Box::new(device.map_err(|error| Error::Sriov { option: option(plan), error })?))
}

fn nic(plan: &NicPlan, option: &str) -> Result<Net, Error> {
    let spec = NetSpec {
        id: plan.id.clone(),
        mac: plan.mac,
        mtu: plan.mtu,
        queue_pairs: plan.queue_pairs,
        queue_size: plan.queue_size,
        offload_tso: plan.offload_tso,
        offload_ufo: plan.offload_ufo,
        offload_csum: plan.offload_csum,
    };
    Net::new(spec, tap(plan, option)?).map_err(|error| Error::Net { option: option.to_string(), error })
}

fn tap(plan: &NicPlan, option: &str) -> Result<Tap, Error> {
    let tap = match &plan.backend {
        BackendPlan::Tap { name, ip, mask, host_mac } => Tap::open(&TapSpec {
            name: name.clone(),
            ip: *ip,
            mask: *mask,
            host_mac: *host_mac,
            mtu: plan.mtu,
            queue_pairs: plan.queue_pairs,
        }),
        BackendPlan::Fds(fds) => {
            let fds = fds.iter().map(|fd| duplicate(*fd, option)).collect::<Result<_, _>>()?;
            Tap::from_fds(fds)
        }
    };
    tap.map_err(|error| Error::Tap { option: option.to_string(), error })
}

/// A file descriptor of our own for one that was passed in by number.
fn duplicate(fd: i32, option: &str) -> Result<OwnedFd, Error> {
    let missing = || Error::Fd { option: option.to_string(), fd };
    // The configuration allows nothing below 3.
    if fd < 0 {
        return Err(missing());
    }
    // SAFETY: the number is only used for this one call, which fails if it is not open.
    let passed = unsafe { BorrowedFd::borrow_raw(fd) };
    passed.try_clone_to_owned().map_err(|_| missing())
}

impl MmioHandler for Devices {
    fn read(&self, address: u64, data: &mut [u8]) {
        if layout::ECAM.contains(&address) {
            return ecam_read(&self.topology, address - layout::ECAM.start, data);
        }
        match self.machine.mmio.find(address) {
            Some((slot, window, offset)) => slot.mmio_read(window, offset, data),
            None => data.fill(0xff),
        }
    }

    fn write(&self, address: u64, data: &[u8]) {
        if layout::ECAM.contains(&address) {
            return ecam_write(&self.topology, address - layout::ECAM.start, data);
        }
        if let Some((slot, window, offset)) = self.machine.mmio.find(address) {
            slot.mmio_write(window, offset, data);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::config::{NetConfig, VmConfig};

    use super::*;

    #[test]
    fn devices_take_the_slots_that_nobody_chose() {
        let net = |pci_device_id| NetConfig { pci_device_id, ..NetConfig::default() };
        let mut config =
            VmConfig { net: vec![net(None), net(Some(1)), net(Some(3)), net(None)], ..VmConfig::default() };
        config.payload.kernel = Some("vmlinux".into());
        let slots = slots(&config.plan().unwrap());
        assert_eq!(slots, [Some(2), Some(1), Some(3), Some(4)]);
    }
}
