//! An emulated Intel X550, or X540, as one PCI device: a PF and up to 63 VFs around one NIC.
//!
//! SR-IOV itself is in [`PfWithVfs`], and the NIC's registers are in the crate `x550`. This file adds what the two do
//! not know: eventfds for MSI-X messages, the guest's memory as each function reaches it, and the data path behind the
//! rings, a [`DataPath`].
//!
//! An access changes configuration space or the NIC under the device's lock. Its effects on the NIC are collected while
//! it passes through the functions, and settled once at its end: the data path is called, and stops what must not run
//! any longer. A PF's reset reaches the NIC last, after that of its VFs, so that nothing of theirs is left in it.
//!
//! | module | subject |
//! |---|---|
//! | `function` | the PF or a VF |
//! | `owed` | what an access leaves to be settled |
//! | `drivers` | the guest's drivers that are up |
//! | `data_path`, `handle` | the interface of the data path, and what its threads use |
//! | `vectors` | eventfds |
//! | `lifecycle`, `state` | pauses and faults; saved state |

mod data_path;
mod drivers;
mod function;
mod handle;
mod lifecycle;
mod owed;
mod state;
mod vectors;

use std::io;
use std::sync::Arc;

use pci::{
    ConfigShape, Device, Dword, DwordWrite, Effects, PfError, PfWithVfs, Placement, PortType, Reach, ResetKind, Rid,
    Role, ShapeError, Sriov, VfIndex, VfPlacement, Window, WindowId,
};
use x550::{Mac, Model, Nic, Place, TOTAL_VFS};

pub use self::data_path::DataPath;
pub use self::function::X550Function;
pub use self::handle::X550Handle;
use self::owed::{Owed, Taken};
use crate::os::thread::Thread;
use crate::{
    DmaSpace, FunctionStatus, HostNic, Inspect, IommuAttachment, Memory, Message, Outcome, ResetBy, Signals,
    SriovStatus, Status, StoppedBy,
};

/// MSI-X vectors of the PF.
const PF_VECTORS: u16 = 64;
/// MSI-X vectors of a VF.
const VF_VECTORS: u16 = 3;

/// An X550, as it is configured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct X550Spec {
    /// The id of the device, for its threads and messages.
    pub id: String,
    /// The product that the guest sees.
    pub model: Model,
    /// The permanent address of the PF.
    pub mac: [u8; 6],
    /// Number of reserved VFs, 0 to 63. With 0 there is no SR-IOV capability.
    pub total_vfs: u16,
}

impl X550Spec {
    /// Files that the device has open besides those of its data path: an eventfd for each interrupt vector, also of VFs
    /// that are not enabled.
    pub fn open_files(&self) -> u64 {
        u64::from(PF_VECTORS) + u64::from(VF_VECTORS) * u64::from(self.total_vfs)
    }
}

/// Reason why an X550 cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum X550Error {
    /// The address is a group address, or zero.
    #[error("mac: not an address that a NIC can have; give one whose first byte is even")]
    Mac,
    /// There are more VFs than the NIC has pools for.
    #[error("{1} VFs; an {0} has at most {TOTAL_VFS}")]
    Vfs(Model, u16),
    /// The placement is for another number of VFs.
    #[error("{vfs} VFs at a place that reserves {reserved}")]
    Count {
        /// Number of VFs wanted.
        vfs: u16,
        /// Number of VFs reserved.
        reserved: u16,
    },
    /// Impossible configuration space.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// The functions cannot be a PF and its VFs.
    #[error(transparent)]
    Device(#[from] PfError),
    /// There is no file descriptor for an interrupt vector.
    #[error("an eventfd for an interrupt vector: {0}")]
    Eventfd(#[source] io::Error),
}

/// The configuration space of the PF; without SR-IOV if there is no place for VFs.
fn pf_shape(model: Model, mac: Mac, placement: Placement) -> ConfigShape {
    let nowhere = VfPlacement { total_vfs: 0, first_vf_offset: 0, vf_stride: 0 };
    let shape = model.pf_config(placement.rid, mac, placement.vfs.unwrap_or(nowhere), PortType::default());
    if placement.vfs.is_some() { shape } else { ConfigShape { role: Role::Plain, ..shape } }
}

/// The place of a VF in the NIC, or the PF's.
fn place(vf: Option<VfIndex>) -> Place {
    vf.map_or(Place::Pf, |index| Place::Vf(index.0))
}

/// An Intel X550 with its VFs.
pub struct X550Sriov {
    functions: PfWithVfs<X550Function>,
    owed: Owed,
    path: Arc<dyn DataPath>,
    memory: DmaSpace,
    mac: Mac,
    /// The host's ends of the functions.
    nics: Vec<Box<dyn HostNic + Send>>,
    /// The host's last attempt to resume failed so.
    not_resumed: Option<io::Error>,
}

impl X550Sriov {
    /// Creates an X550 at power-on, with a link that is down, whose frames `path` moves.
    ///
    /// # Errors
    ///
    /// Fails if the address or the number of VFs is impossible, `placement` is for another number, or the host has no
    /// file descriptor left, of which it needs [`X550Spec::open_files`].
    pub fn new(
        spec: X550Spec,
        placement: Placement,
        memory: &Memory,
        path: Arc<dyn DataPath>,
    ) -> Result<Self, X550Error> {
        let X550Spec { id, model, mac, total_vfs } = spec;
        let reserved = placement.vfs.map_or(0, |vfs| vfs.total_vfs);
        if mac[0] & 1 != 0 || mac == [0; 6] {
            return Err(X550Error::Mac);
        }
        if total_vfs > TOTAL_VFS {
            return Err(X550Error::Vfs(model, total_vfs));
        }
        if total_vfs != reserved {
            return Err(X550Error::Count { vfs: total_vfs, reserved });
        }
        let (mac, memory) = (Mac(mac), DmaSpace::from(memory.clone()));
        let (pf, vf) = (pf_shape(model, mac, placement), model.vf_config(PortType::default()));
        let vectors = std::iter::once(PF_VECTORS).chain((0..total_vfs).map(|_| VF_VECTORS));
        let nic = X550Handle::new(id, Nic::with_model(model, mac), vectors, &memory);
        let nic = nic.map_err(X550Error::Eventfd)?;
        let owed = Owed::new(nic, total_vfs);
        let pf = X550Function::new(Place::Pf, placement.rid, pf, &owed)?;
        let functions = match placement.vfs {
            None => PfWithVfs::without_vfs(placement.rid, pf)?,
            Some(vfs) => {
                let new = |index| {
                    let rid = vfs.vf_rid(placement.rid, VfIndex(index));
                    X550Function::new(Place::Vf(index), rid, vf.clone(), &owed)
                };
                PfWithVfs::new(placement.rid, pf, (0..total_vfs).map(new).collect::<Result<_, _>>()?)?
            }
        };
        path.begin(owed.nic());
        let nics = path.host_nics();
        Ok(Self { functions, owed, path, memory, mac, nics, not_resumed: None })
    }

    /// Puts each function behind the IOMMU for which `place` returns an [`IommuAttachment`], if any. Must be called
    /// before any access.
    pub fn attach_iommu(&mut self, mut place: impl FnMut(Rid) -> Option<IommuAttachment>) {
        for function in self.functions.functions_mut() {
            if let Some(attachment) = place(function.rid()) {
                function.attach_iommu(attachment, &self.memory);
            }
        }
    }

    /// The NIC, for threads of the data path and for the host.
    pub fn nic(&self) -> &X550Handle {
        self.owed.nic()
    }

    /// The SR-IOV capability, if there are VFs.
    pub fn sriov(&self) -> Option<&Sriov> {
        self.functions.sriov()
    }

    /// Connects or disconnects the link, and notifies the PF's driver.
    pub fn set_link(&self, up: bool) {
        self.nic().set_link(up);
    }

    /// The PF, or one of its VFs, existing or not.
    fn function(&self, vf: Option<VfIndex>) -> Option<&X550Function> {
        vf.map_or(Some(self.functions.pf()), |index| self.functions.vf(index))
    }

    /// Ends an access: resets the NIC if the PF was reset, and tells the data path.
    fn settle(&self, mut outcome: Outcome) -> Outcome {
        // A VF's reset was handled by the VF.
        if let Some(kind) = outcome.effects.reset.take() {
            self.owed.reset(kind);
        }
        let Taken { effects, drivers } = self.owed.take();
        let x550::Effects { vectors: _, queues, pools, moderation, doorbell, steering } = effects;
        let nic = self.nic();
        // A queue that starts finds its pool.
        if pools || steering {
            self.path.pools_changed(nic);
        }
        if moderation {
            self.path.moderation_changed(nic);
        }
        if queues {
            outcome.stopping.extend(self.path.queues_changed(nic));
        }
        if let Some(doorbell) = doorbell {
            self.path.doorbell(nic, doorbell);
        }
        if drivers && self.owed.with_drivers(|drivers| drivers.look(&nic.lock())) {
            // For those who watch the drivers.
            outcome.effects = outcome.effects.and(Effects::QUEUES);
        }
        outcome
    }

    /// The register that keeps the queues of a driver that is up from running, if one does.
    fn stopped_by(&self, function: &X550Function) -> Option<StoppedBy> {
        let config = pci::Function::config(function);
        let is_vf = function.place() != Place::Pf;
        if is_vf && !self.functions.is_powered() {
            Some(StoppedBy::PfD3hot)
        } else if !config.is_d0() {
            Some(StoppedBy::D3hot)
        } else {
            (!config.bus_master()).then_some(StoppedBy::BusMaster)
        }
    }
}

/// SR-IOV is the business of [`PfWithVfs`].
impl Device for X550Sriov {
    type Stopping = Thread;

    fn config_read(&self, rid: Rid, reg: Dword) -> u32 {
        self.functions.config_read(rid, reg)
    }

    fn config_write(&mut self, rid: Rid, reg: Dword, write: DwordWrite) -> Outcome {
        let outcome = self.functions.config_write(rid, reg, write);
        self.settle(outcome)
    }

    fn mmio_read(&mut self, window: WindowId, offset: u64, data: &mut [u8]) {
        self.functions.mmio_read(window, offset, data);
    }

    fn mmio_write(&mut self, window: WindowId, offset: u64, data: &[u8]) -> Outcome {
        let outcome = self.functions.mmio_write(window, offset, data);
        self.settle(outcome)
    }

    fn may_send(&self, rid: Rid) -> bool {
        self.functions.may_send(rid)
    }

    fn windows(&self, out: &mut Vec<Window>) {
        self.functions.windows(out);
    }

    fn reset(&mut self, kind: ResetKind) -> Outcome {
        let outcome = self.functions.reset(kind);
        self.settle(outcome)
    }
}

impl Signals for X550Sriov {
    fn messages(&self, reach: Reach, out: &mut Vec<Message>) {
        let is_reached = |function: &X550Function| match reach {
            Reach::Nothing => false,
            Reach::Function(rid) => function.rid() == rid,
            Reach::Device => true,
        };
        let functions = std::iter::once(self.functions.pf()).chain(self.functions.visible().map(|(_, vf)| vf));
        let may_send = |function: &&X550Function| is_reached(function) && self.may_send(function.rid());
        functions.filter(may_send).for_each(|function| function.sendable(out));
    }
}

impl Inspect for X550Sriov {
    /// The driver is [`Status::DRIVER_OK`] while it reports itself in CTRL_EXT (PF), or has a receive queue enabled
    /// (VF). It is [`Status::DRIVER`] from then on, or from when it sets Bus Master Enable, which a driver does first
    /// and clears last.
    fn function_status(&self, vf: Option<VfIndex>) -> Option<FunctionStatus> {
        let function = self.function(vf)?;
        let removed = vf.is_some_and(|index| self.functions.is_removed(index));
        let exists = vf.is_none_or(|index| index.0 < self.functions.num_visible() && !removed);
        let place = place(vf);
        let (is_up, reset_by) = self.owed.with_drivers(|drivers| (drivers.is_up(place), drivers.reset_by(place)));
        let mut driver = Status::empty();
        if is_up || pci::Function::config(function).bus_master() {
            driver |= Status::ACKNOWLEDGE | Status::DRIVER;
        }
        if is_up {
            driver |= Status::FEATURES_OK | Status::DRIVER_OK;
        }
        Some(FunctionStatus {
            exists,
            removed,
            driver,
            stopped_by: self.stopped_by(function).filter(|_| is_up),
            reset_by: if removed { ResetBy::Removal } else { reset_by },
            // Its guest sets its policies by its registers alone.
            conventional_resets: 0,
        })
    }

    fn host_nic(&mut self, vf: Option<VfIndex>) -> Option<&mut dyn HostNic> {
        let number = vf.map_or(0, |index| usize::from(index.0) + 1);
        self.nics.get_mut(number).map(|nic| -> &mut dyn HostNic { &mut **nic })
    }

    fn sriov_status(&self) -> Option<SriovStatus> {
        let disabled_by = self.owed.with_drivers(|drivers| drivers.vfs_disabled_by());
        let sriov = self.sriov()?;
        Some(SriovStatus { num_vfs: sriov.num_vfs(), vf_enable: sriov.vf_enable(), disabled_by })
    }
}

#[cfg(test)]
mod tests;
