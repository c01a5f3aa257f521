//! IOTLB messages between this program, which translates, and a backend that runs queues: the host's kernel, or another
//! process (Linux, `include/uapi/linux/vhost_types.h`, `struct vhost_iotlb_msg`).

use vm_memory::Permissions;

use super::mapping::Mapping;

/// The length of a message in bytes.
pub(crate) const LEN: usize = 32;

/// The types of messages.
const MISS: u8 = 1;
const UPDATE: u8 = 2;
const INVALIDATE: u8 = 3;
/// The accesses of a translation.
const READ: u8 = 1;
const WRITE: u8 = 2;

/// An address that a backend cannot translate. The queue that used it waits for an update.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Miss {
    /// The address.
    pub address: u64,
    /// The attempted access.
    pub access: Permissions,
}

impl Miss {
    /// Parses the start of `said`. `None` if it is not a miss.
    pub(crate) fn parse(said: &[u8]) -> Option<Self> {
        let (address, _) = said.split_first_chunk()?;
        let [access, about] = said.get(24..26)? else { return None };
        let access = match access & (READ | WRITE) {
            READ => Permissions::Read,
            WRITE => Permissions::Write,
            _ => Permissions::ReadWrite,
        };
        (*about == MISS).then_some(Self { address: u64::from_ne_bytes(*address), access })
    }
}

/// A message that maps a range.
pub(crate) fn update(mapping: &Mapping, access: Permissions) -> [u8; LEN] {
    let access = if access.allow(Permissions::Read) { READ } else { 0 }
        | if access.allow(Permissions::Write) { WRITE } else { 0 };
    said([mapping.iova(), mapping.size(), mapping.host()], access, UPDATE)
}

/// A message that unmaps a range, and every mapping that overlaps it.
pub(crate) fn invalidate(first: u64, last: u64) -> [u8; LEN] {
    // The end, one past the last address, must fit. No mapping is one byte long, so the last byte can be left out.
    let len = (last - first).saturating_add(1).min(u64::MAX - first);
    said([first, len, 0], 0, INVALIDATE)
}

fn said([first, len, host]: [u64; 3], access: u8, about: u8) -> [u8; LEN] {
    let mut said = [0; LEN];
    let mut put = |at: usize, bytes: &[u8]| said[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &first.to_ne_bytes());
    put(8, &len.to_ne_bytes());
    put(16, &host.to_ne_bytes());
    put(24, &[access, about]);
    said
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_to_the_kernel_has_its_layout() {
        let said = update(&Mapping::for_test(0x1122, 0x2000), Permissions::ReadWrite);
        assert_eq!(said[..16], [0x22, 0x11, 0, 0, 0, 0, 0, 0, 0, 0x20, 0, 0, 0, 0, 0, 0]);
        assert_eq!(said[16..], [0, 0, 0, 0, 0, 0x7f, 0, 0, 3, 2, 0, 0, 0, 0, 0, 0]);
        assert_eq!(invalidate(0x1000, 0x1fff), super::said([0x1000, 0x1000, 0], 0, INVALIDATE));
        assert_eq!(invalidate(0, u64::MAX), super::said([0, u64::MAX, 0], 0, INVALIDATE));
        let top = u64::MAX - 0xfff;
        assert_eq!(invalidate(top, u64::MAX), super::said([top, 0xfff, 0], 0, INVALIDATE));
    }

    #[test]
    fn a_question_is_read_and_nothing_else_is_one() {
        let miss = said([0x1122, 0, 0], WRITE, MISS);
        assert_eq!(Miss::parse(&miss), Some(Miss { address: 0x1122, access: Permissions::Write }));
        assert_eq!(Miss::parse(&miss[..26]), Miss::parse(&miss), "without what makes it a multiple of 8 bytes");
        assert_eq!(Miss::parse(&miss[..25]), None);
        assert_eq!(Miss::parse(&said([0x1122, 0, 0], READ, UPDATE)), None);
    }
}
