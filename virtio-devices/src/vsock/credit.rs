//! Flow control: neither side sends more than the other has room for (`virtio 1.4 §5.10.6.3`).
//!
//! Both counts of a direction run freely and wrap.

use super::packet::Header;

/// The buffer space for the guest's data that the host has not accepted, in bytes for each connection, while there are
/// few: that of a Linux socket, so that a guest sends several packets before it waits.
pub(crate) const ROOM: u32 = 256 << 10;
/// The buffer space of each connection that is opened after [`FEW`] others: what Linux sends in one packet.
pub(crate) const LITTLE_ROOM: u32 = 64 << 10;
/// Number of connections with [`ROOM`]. All 1,023 together have 76 MiB.
pub(crate) const FEW: usize = 64;

/// Credit for data from the guest.
#[derive(Debug)]
pub(crate) struct FromGuest {
    /// The buffer space for data received and not forwarded, in bytes.
    room: u32,
    received: u32,
    forwarded: u32,
    /// `forwarded` as last sent to the guest.
    told: u32,
}

impl FromGuest {
    /// Creates the credit of a connection that is opened in addition to `others`.
    pub(crate) fn beside(others: usize) -> Self {
        let room = if others < FEW { ROOM } else { LITTLE_ROOM };
        Self { room, received: 0, forwarded: 0, told: 0 }
    }

    /// Counts `len` bytes received; false if there is no room for them.
    pub(crate) fn receive(&mut self, len: usize) -> bool {
        let room = self.room.saturating_sub(self.received.wrapping_sub(self.forwarded));
        let Some(len) = u32::try_from(len).ok().filter(|len| *len <= room) else { return false };
        self.received = self.received.wrapping_add(len);
        true
    }

    /// Counts `len` bytes accepted by the host.
    pub(crate) fn forward(&mut self, len: usize) {
        // At most the room, which is a u32.
        self.forwarded = self.forwarded.wrapping_add(len as u32);
    }

    /// True if the guest may soon stop for lack of credit although there is room.
    pub(crate) fn should_tell(&self) -> bool {
        let known = self.room.saturating_sub(self.received.wrapping_sub(self.told));
        // At half the room, the guest does not stop before it gets the update.
        known < self.room / 2 && self.told != self.forwarded
    }

    /// Puts the credit into a packet for the guest.
    pub(crate) fn tell(&mut self, header: &mut Header) {
        self.told = self.forwarded;
        header.buf_alloc = self.room.into();
        header.fwd_cnt = self.forwarded.into();
    }
}

/// Credit for data to the guest.
#[derive(Debug, Default)]
pub(crate) struct ToGuest {
    sent: u32,
    buf_alloc: u32,
    fwd_cnt: u32,
}

impl ToGuest {
    /// Reads the guest's credit from a packet.
    pub(crate) fn hear(&mut self, header: &Header) {
        self.buf_alloc = header.buf_alloc.get();
        self.fwd_cnt = header.fwd_cnt.get();
    }

    /// Bytes that the guest has room for: 0 if it claims to have forwarded more than it received.
    pub(crate) fn room(&self) -> usize {
        self.buf_alloc.saturating_sub(self.sent.wrapping_sub(self.fwd_cnt)) as usize
    }

    /// Counts `len` bytes sent, which must fit the room.
    pub(crate) fn send(&mut self, len: usize) {
        self.sent = self.sent.wrapping_add(len as u32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(buf_alloc: u32, fwd_cnt: u32) -> Header {
        Header { buf_alloc: buf_alloc.into(), fwd_cnt: fwd_cnt.into(), ..Header::default() }
    }

    #[test]
    fn a_guest_cannot_send_more_than_there_is_room_for() {
        let mut credit = FromGuest::beside(0);
        assert!(credit.receive(ROOM as usize - 1) && !credit.receive(2) && credit.receive(1));
        credit.forward(10);
        assert!(!credit.receive(11) && !credit.receive(usize::MAX) && credit.receive(10));
    }

    #[test]
    fn a_guest_is_told_of_room_before_it_has_none_and_once() {
        const HALF: u32 = ROOM / 2;
        let start = u32::MAX - 5;
        let mut credit = FromGuest { room: ROOM, received: start, forwarded: start, told: start };
        assert!(credit.receive(HALF as usize));
        credit.forward(HALF as usize);
        assert!(!credit.should_tell());
        assert!(credit.receive(1) && credit.should_tell());
        let mut header = Header::default();
        credit.tell(&mut header);
        assert_eq!((header.buf_alloc.get(), header.fwd_cnt.get()), (ROOM, HALF - 6));
        assert!(!credit.should_tell());
        assert!(credit.receive(ROOM as usize - 1) && !credit.should_tell(), "there is nothing to tell");
    }

    #[test]
    fn guest_credit_never_exceeds_what_the_guest_reports() {
        let mut credit = ToGuest::default();
        assert_eq!(credit.room(), 0);
        credit.hear(&told(100, 0));
        credit.send(60);
        assert_eq!(credit.room(), 40);
        credit.hear(&told(100, 61));
        assert_eq!(credit.room(), 0, "it cannot have passed on more than it got");
        credit.hear(&told(50, 0));
        assert_eq!(credit.room(), 0, "it took room back");
        credit.hear(&told(u32::MAX, 60));
        assert_eq!(credit.room(), u32::MAX as usize);
    }
}
