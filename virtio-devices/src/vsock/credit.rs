//! Flow control: neither side sends what the other has no room for (`virtio 1.4 §5.10.6.3`).
//!
//! Both counts of a direction run freely and wrap.

use super::packet::Header;

/// The room for what the guest sent and the host has not taken, in bytes for each connection, as long as there are few:
/// as much as a socket of Linux has, so that a guest sends several packets before it waits.
pub(crate) const ROOM: u32 = 256 << 10;
/// The room of each connection that is opened when there are [`FEW`] already: what Linux sends in one packet.
pub(crate) const LITTLE_ROOM: u32 = 64 << 10;
/// Number of connections up to which each has much room. All 1,023 together have 76 MiB.
pub(crate) const FEW: usize = 64;

/// Credit for data from the guest.
#[derive(Debug)]
pub(crate) struct FromGuest {
    /// The room for what was received and not forwarded, in bytes.
    room: u32,
    received: u32,
    forwarded: u32,
    /// `forwarded`, as the guest was last told.
    told: u32,
}

impl FromGuest {
    /// Nothing has been sent yet on a connection that is opened beside `others`.
    pub(crate) fn beside(others: usize) -> Self {
        let room = if others < FEW { ROOM } else { LITTLE_ROOM };
        Self { room, received: 0, forwarded: 0, told: 0 }
    }

    /// Counts `len` bytes, unless that is more than there is room for.
    pub(crate) fn receive(&mut self, len: usize) -> bool {
        let room = self.room.saturating_sub(self.received.wrapping_sub(self.forwarded));
        let Some(len) = u32::try_from(len).ok().filter(|len| *len <= room) else { return false };
        self.received = self.received.wrapping_add(len);
        true
    }

    /// The host has taken `len` of the bytes received.
    pub(crate) fn forward(&mut self, len: usize) {
        // Never more than there is room for.
        self.forwarded = self.forwarded.wrapping_add(len as u32);
    }

    /// True if the guest may soon stop for lack of credit although there is room.
    pub(crate) fn should_tell(&self) -> bool {
        let known = self.room.saturating_sub(self.received.wrapping_sub(self.told));
        // At half the room, it need not stop while it is told.
        known < self.room / 2 && self.told != self.forwarded
    }

    /// Tells the guest, in a packet that goes to it.
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
    /// The guest tells of its room.
    pub(crate) fn hear(&mut self, header: &Header) {
        self.buf_alloc = header.buf_alloc.get();
        self.fwd_cnt = header.fwd_cnt.get();
    }

    /// Bytes that the guest has room for: 0 for a guest that claims to have passed on more than it got.
    pub(crate) fn room(&self) -> usize {
        self.buf_alloc.saturating_sub(self.sent.wrapping_sub(self.fwd_cnt)) as usize
    }

    /// Counts `len` bytes, for which there is room.
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
    fn what_a_guest_says_of_its_room_is_never_believed_to_be_more_than_it_says() {
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
