//! Resets of the NIC and of its VFs.

use crate::effects::{Effects, Place};
use crate::flow::FlowTable;
use crate::interrupts::Interrupts;
use crate::mailbox::{Mailbox, Owner};
use crate::nic::Nic;
use crate::queue::{self, QUEUES};
use crate::registers::Registers;
use crate::spec;
use crate::timers::Timers;

impl Nic {
    /// Returns to the power-on state: a conventional reset, or a function level reset of the PF. The link, and the
    /// number of VFs, stay as they are.
    pub fn reset(&mut self) -> Effects {
        let (num_vfs, links) = (self.num_vfs, self.registers.get(spec::LINKS));
        let timers = std::mem::replace(&mut self.timers, Timers::new());
        *self = Self::with_model(self.model, self.mac);
        // The time stays.
        (self.num_vfs, self.timers) = (num_vfs, timers);
        self.timers.reset(None);
        self.registers.set(spec::LINKS, links);
        Effects::ALL
    }

    /// CTRL.RST: resets the PF's registers, and with them the queues of all VFs, which see RSTI until the PF's driver
    /// writes PFRSTD. The semaphores, the PHY and the firmware's buffer stay, and so do the VFs' interrupts, through
    /// which the PF notifies them later.
    pub(crate) fn reset_registers(&mut self) -> Effects {
        let kept = [spec::LINKS, 0x10160].map(|offset| (offset, self.registers.get(offset)));
        self.registers = Registers::new(self.mac);
        for (offset, value) in kept {
            self.registers.set(offset, value);
        }
        self.interrupts = Interrupts::new();
        self.timers.reset(Some(Place::Pf));
        (self.rates, self.drops) = ([0; 128], [0; 128]);
        self.flow_table = FlowTable::new(&self.registers, self.model);
        self.in_reset = true;
        for own in &mut self.vfs {
            let owner = own.mailbox.owner.filter(|owner| *owner == Owner::Vf);
            own.mailbox = Mailbox { owner, buffer: own.mailbox.buffer, ..Mailbox::default() };
        }
        Effects::ALL
    }

    pub(crate) fn end_reset(&mut self, ctrl_ext: u32) {
        if self.in_reset && ctrl_ext & spec::CTRL_EXT_PFRSTD != 0 {
            self.in_reset = false;
            self.vfs.iter_mut().for_each(|own| own.mailbox.reset_done = true);
        }
    }

    /// Resets VF `index`: its function level reset, or VFCTRL.RST. Its queues, its interrupts and its ownership of the
    /// mailbox end, and the PF is notified. The PF's registers for the VF stay.
    pub fn reset_vf(&mut self, index: u16) -> Effects {
        let Some(own) = self.vfs.get_mut(usize::from(index)) else { return Effects::NONE };
        own.reset();
        self.timers.reset(Some(Place::Vf(index)));
        let per_pool = queue::per_pool(&self.registers);
        let first = index.saturating_mul(per_pool);
        for queue in (first..first.saturating_add(per_pool)).filter(|queue| *queue < QUEUES) {
            self.registers.reset_range(queue::receive_block(queue), spec::QUEUE_LEN);
            self.registers.reset_range(queue::transmit_block(queue), spec::QUEUE_LEN);
        }
        self.registers.reset_range(spec::PSRTYPE + 4 * u32::from(index), 4);
        self.registers.reset_range(spec::PFVFMRQC + 4 * u32::from(index), 4);
        let notified = self.raise(spec::EICR_MAILBOX);
        notified.and(Effects { queues: true, steering: true, ..Effects::NONE })
    }
}
