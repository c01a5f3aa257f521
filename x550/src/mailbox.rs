//! The mailbox between a VF and its PF (`PF/VF Mailbox`), and what else the two share of a VF.
//!
//! The NIC moves 64 bytes and bits; messages are the drivers' own.

/// Bits of VFMAILBOX.
pub(crate) mod vf {
    /// Request for the PF; write-only.
    pub(crate) const REQ: u32 = 1 << 0;
    /// Acknowledgement for the PF; write-only.
    pub(crate) const ACK: u32 = 1 << 1;
    /// The VF has the buffer.
    pub(crate) const VFU: u32 = 1 << 2;
    /// The PF has the buffer.
    pub(crate) const PFU: u32 = 1 << 3;
    /// The PF wrote a message; a read clears it.
    pub(crate) const PFSTS: u32 = 1 << 4;
    /// The PF acknowledged a message; a read clears it.
    pub(crate) const PFACK: u32 = 1 << 5;
    /// The PF is in reset.
    pub(crate) const RSTI: u32 = 1 << 6;
    /// The PF's reset ended; a read clears it.
    pub(crate) const RSTD: u32 = 1 << 7;
}

/// Bits of PFMAILBOX.
pub(crate) mod pf {
    /// Message for the VF; write-only.
    pub(crate) const STS: u32 = 1 << 0;
    /// Acknowledgement for the VF; write-only.
    pub(crate) const ACK: u32 = 1 << 1;
    /// The VF has the buffer.
    pub(crate) const VFU: u32 = 1 << 2;
    /// The PF has the buffer.
    pub(crate) const PFU: u32 = 1 << 3;
    /// Takes the buffer from the VF; write-only.
    pub(crate) const RVFU: u32 = 1 << 4;
}

/// Owner of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Owner {
    /// The PF.
    Pf,
    /// The VF.
    Vf,
}

/// The state that a VF shares with its PF, besides the registers of its pool.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct Mailbox {
    /// The buffer.
    pub buffer: [u32; 16],
    /// The owner of the buffer.
    pub owner: Option<Owner>,
    /// PFSTS: the PF wrote a message.
    pub pf_message: bool,
    /// PFACK: the PF acknowledged one.
    pub pf_acknowledged: bool,
    /// RSTD: the PF's reset ended.
    pub reset_done: bool,
    /// Bit of MBVFICR: the VF wrote a message.
    pub vf_message: bool,
    /// Bit of MBVFICR: the VF acknowledged one.
    pub vf_acknowledged: bool,
    /// Bit of VFLRE: the VF was reset.
    pub vf_reset: bool,
}

impl Mailbox {
    /// VFMAILBOX. `in_reset` is true while the PF is in reset.
    pub(crate) fn peek_vf(&self, in_reset: bool) -> u32 {
        let bit = |set: bool, bit: u32| if set { bit } else { 0 };
        bit(self.owner == Some(Owner::Vf), vf::VFU)
            | bit(self.owner == Some(Owner::Pf), vf::PFU)
            | bit(self.pf_message, vf::PFSTS)
            | bit(self.pf_acknowledged, vf::PFACK)
            | bit(in_reset, vf::RSTI)
            | bit(self.reset_done, vf::RSTD)
    }

    /// Clears the bits of VFMAILBOX that a read clears.
    pub(crate) fn after_vf_read(&mut self) {
        self.pf_message = false;
        self.pf_acknowledged = false;
        self.reset_done = false;
    }

    /// Writes VFMAILBOX. Returns true if the PF has a new event.
    pub(crate) fn write_vf(&mut self, value: u32) -> bool {
        self.take(Owner::Vf, value & vf::VFU != 0);
        self.vf_message |= value & vf::REQ != 0;
        self.vf_acknowledged |= value & vf::ACK != 0;
        value & (vf::REQ | vf::ACK) != 0
    }

    /// PFMAILBOX.
    pub(crate) fn peek_pf(&self) -> u32 {
        match self.owner {
            Some(Owner::Vf) => pf::VFU,
            Some(Owner::Pf) => pf::PFU,
            None => 0,
        }
    }

    /// Writes PFMAILBOX. Returns true if the VF has a new event.
    pub(crate) fn write_pf(&mut self, value: u32) -> bool {
        if value & pf::RVFU != 0 {
            self.take(Owner::Vf, false);
        }
        self.take(Owner::Pf, value & pf::PFU != 0);
        self.pf_message |= value & pf::STS != 0;
        self.pf_acknowledged |= value & pf::ACK != 0;
        value & (pf::STS | pf::ACK) != 0
    }

    /// Gives the buffer to `side` if it is free, or takes it back from that side.
    fn take(&mut self, side: Owner, wanted: bool) {
        match (self.owner, wanted) {
            (None, true) => self.owner = Some(side),
            (Some(owner), false) if owner == side => self.owner = None,
            _ => {}
        }
    }

    /// Resets the VF's part: its events and its ownership. The PF's events of this VF stay.
    pub(crate) fn reset_vf(&mut self) {
        self.take(Owner::Vf, false);
        self.pf_message = false;
        self.pf_acknowledged = false;
        self.vf_reset = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A lock is granted if it is free, and a write without the bit releases it.
    #[test]
    fn the_buffer_has_one_owner() {
        let mut mailbox = Mailbox::default();
        let state = |mailbox: &Mailbox| (mailbox.peek_vf(false), mailbox.peek_pf());
        mailbox.write_vf(vf::VFU);
        assert_eq!(state(&mailbox), (vf::VFU, pf::VFU));
        mailbox.write_pf(pf::PFU);
        assert_eq!(state(&mailbox), (vf::VFU, pf::VFU), "not granted");
        mailbox.write_pf(0);
        assert_eq!(state(&mailbox), (vf::VFU, pf::VFU), "the PF does not have it");
        mailbox.write_vf(0);
        assert_eq!(state(&mailbox), (0, 0));
        mailbox.write_pf(pf::PFU);
        mailbox.write_vf(vf::VFU);
        assert_eq!(state(&mailbox), (vf::PFU, pf::PFU));
        mailbox.write_pf(0);
        mailbox.write_vf(vf::VFU);
        mailbox.write_pf(pf::RVFU);
        assert_eq!(state(&mailbox), (0, 0), "taken back by the PF");
        mailbox.write_vf(vf::VFU);
        mailbox.write_pf(pf::RVFU | pf::PFU);
        assert_eq!(state(&mailbox), (vf::PFU, pf::PFU), "and taken over");
    }

    #[test]
    fn a_read_of_the_vf_clears_the_bits_of_its_pf() {
        let mut mailbox = Mailbox { reset_done: true, ..Mailbox::default() };
        assert!(mailbox.write_pf(pf::STS) && mailbox.write_pf(pf::ACK) && !mailbox.write_pf(pf::PFU));
        assert_eq!(mailbox.peek_vf(true), vf::PFU | vf::PFSTS | vf::PFACK | vf::RSTI | vf::RSTD);
        mailbox.after_vf_read();
        assert_eq!(mailbox.peek_vf(true), vf::PFU | vf::RSTI);
    }

    #[test]
    fn a_reset_of_the_vf_frees_its_buffer_alone() {
        let mut mailbox = Mailbox::default();
        assert!(mailbox.write_vf(vf::VFU | vf::REQ));
        mailbox.write_pf(pf::ACK);
        mailbox.reset_vf();
        let expected = Mailbox { vf_message: true, vf_reset: true, ..Mailbox::default() };
        assert_eq!(mailbox, expected);
        mailbox.write_pf(pf::PFU);
        mailbox.reset_vf();
        assert_eq!(mailbox.peek_pf(), pf::PFU);
    }
}
