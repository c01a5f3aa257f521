//! The PF or a VF of an X550: its configuration space, and its view of the NIC's registers.

use pci::{BarIndex, ConfigShape, ConfigSpace, Effects, Function, Msix, ResetKind, Rid, ShapeError, Sriov, VfChange};
use x550::{Place, REGISTERS_BAR};

use super::drivers::is_report;
use super::owed::Owed;
use super::vectors::Vectors;
use crate::os::thread::Thread;
use crate::{DmaSpace, IommuAttachment, Message, Outcome};

/// The PF or a VF.
///
/// What an access changes in the NIC is collected in [`Owed`], and settled by the device when the access has reached
/// all functions.
pub struct X550Function {
    place: Place,
    rid: Rid,
    config: ConfigSpace,
    owed: Owed,
    /// The function's IOMMU endpoint, if it is behind an IOMMU.
    attachment: Option<IommuAttachment>,
}

impl X550Function {
    /// The function `place` at `rid`.
    pub(super) fn new(place: Place, rid: Rid, shape: ConfigShape, owed: &Owed) -> Result<Self, ShapeError> {
        Ok(Self { place, rid, config: ConfigSpace::new(shape)?, owed: owed.clone(), attachment: None })
    }

    /// The routing ID.
    pub fn rid(&self) -> Rid {
        self.rid
    }

    /// Its place in the NIC.
    pub fn place(&self) -> Place {
        self.place
    }

    /// Puts the function behind an IOMMU. Must be called before any access.
    pub(super) fn attach_iommu(&mut self, attachment: IommuAttachment, memory: &DmaSpace) {
        let endpoint = attachment.endpoint().clone();
        let space = DmaSpace::translated(memory.memory().clone(), endpoint);
        self.owed.nic().set_memory(self.place, space);
        self.attachment = Some(attachment);
    }

    /// Its vectors.
    pub(super) fn vectors(&self) -> Option<&Vectors> {
        self.owed.nic().vectors(self.place)
    }

    /// Appends the messages that the function may send, as far as its own registers say.
    pub(super) fn sendable(&self, out: &mut Vec<Message>) {
        let vectors = 0..self.config.msix().map_or(0, Msix::vectors);
        out.extend(vectors.filter_map(|vector| {
            let (address, data) = self.config.message(vector)?;
            let eventfd = self.vectors()?.eventfd(vector)?.clone();
            Some(Message { requester: self.rid, address, data, eventfd })
        }));
    }

    /// True if no driver has changed anything of its configuration space.
    pub(super) fn is_untouched(&self) -> bool {
        let mut config = self.config.clone();
        let _ = config.reset(ResetKind::Conventional);
        config == self.config
    }

    /// Records if the registers let the function be a bus master; see [`Function`] for `powered`.
    pub(super) fn settle_master(&self, powered: bool) {
        self.owed.set_master(self.place, powered && self.config.bus_master());
    }

    /// The number of VFs that exist, of a PF.
    pub(super) fn num_visible(&self) -> u16 {
        self.config.sriov().map_or(0, Sriov::num_visible)
    }
}

impl Function for X550Function {
    type Stopping = Thread;

    fn config(&self) -> &ConfigSpace {
        &self.config
    }

    fn config_mut(&mut self) -> &mut ConfigSpace {
        &mut self.config
    }

    fn changed(&mut self, mut effects: Effects, powered: bool) -> Outcome {
        self.settle_master(powered);
        match self.place {
            // VFs that are disabled with the PF are reset before the NIC is: the device does that, which finds the
            // reset in these effects.
            Place::Pf => {
                if let Some(change) = effects.vfs {
                    let disabled = matches!(change, VfChange::Disabled { .. });
                    self.owed.set_num_vfs(self.num_visible(), disabled.then_some(effects.reset));
                }
            }
            Place::Vf(index) => {
                if let Some(kind) = effects.reset.take() {
                    self.owed.reset_vf(index, kind);
                }
            }
        }
        effects.into()
    }

    fn bar_read(&mut self, bar: BarIndex, offset: u64, data: &mut [u8]) {
        if bar == REGISTERS_BAR {
            return self.owed.nic().lock().read(self.place, offset, data);
        }
        let vectors = self.owed.nic().vectors(self.place);
        // An eventfd may still hold a signal that was sent.
        let raised = |vector| vectors.is_some_and(|vectors| vectors.is_signalled(vector));
        if !self.config.msix_read(bar, offset, data, raised) {
            // Between the structures there is nothing.
            data.fill(0);
        }
    }

    fn bar_write(&mut self, bar: BarIndex, offset: u64, data: &[u8], _powered: bool) -> Outcome {
        if bar == REGISTERS_BAR {
            self.owed.change(|nic| nic.write(self.place, offset, data));
            if self.place == Place::Pf && is_report(offset, data.len()) {
                self.owed.note_report();
            }
            return Outcome::none();
        }
        self.config.msix_write(bar, offset, data).unwrap_or(Effects::NONE).into()
    }
}
