//! The messages by which the kernel's vhost asks what addresses of a function stand for, and is told
//! (Linux, `include/uapi/linux/vhost_types.h`, `struct vhost_msg_v2`).

use std::io;
use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use vm_memory::Permissions;

use crate::backend::mapping::Mapping;

/// The length of a message: its kind, 4 bytes of no use here, and a union whose largest member has 64 bytes.
const LEN: usize = 72;
/// A message of the second kind about a translation.
const IOTLB_V2: u32 = 2;
/// What it is about, in its last field.
const MISS: u8 = 1;
const UPDATE: u8 = 2;
const INVALIDATE: u8 = 3;
/// The accesses of a translation.
const READ: u8 = 1;
const WRITE: u8 = 2;

/// An address of which the kernel does not know what it stands for. The queue that named it waits for an update.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Miss {
    /// The address.
    pub address: u64,
    /// What was to be done there.
    pub access: Permissions,
}

/// Reads what the kernel wants to know next. `None` if there is nothing.
///
/// # Errors
///
/// When the kernel does not answer.
pub(super) fn read_miss(device: BorrowedFd<'_>) -> io::Result<Option<Miss>> {
    let mut message = [0; LEN];
    loop {
        match rustix::io::read(device, &mut message) {
            Ok(LEN) => {
                if let Some(miss) = parse(&message) {
                    return Ok(Some(miss));
                }
            }
            Ok(_) | Err(Errno::AGAIN) => return Ok(None),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Tells the kernel what a range stands for. Queues that wait for it go on.
///
/// # Errors
///
/// When the kernel has no memory for it.
pub(super) fn update(device: BorrowedFd<'_>, mapping: &Mapping) -> io::Result<()> {
    let access = if mapping.access().allow(Permissions::Read) { READ } else { 0 }
        | if mapping.access().allow(Permissions::Write) { WRITE } else { 0 };
    write(device, [mapping.iova(), mapping.size(), mapping.host()], access, UPDATE)
}

/// Has the kernel forget what is in a range, and all that reaches into it. When this returns, no queue uses it.
///
/// # Errors
///
/// When the kernel does not take the message.
pub(super) fn invalidate(device: BorrowedFd<'_>, first: u64, last: u64) -> io::Result<()> {
    // All of the addresses are one more than fits. Nothing that is mapped is one byte long: the last can be left out.
    let len = (last - first).saturating_add(1);
    write(device, [first, len, 0], 0, INVALIDATE)
}

fn write(device: BorrowedFd<'_>, numbers: [u64; 3], access: u8, kind: u8) -> io::Result<()> {
    let message = message(numbers, access, kind);
    loop {
        match rustix::io::write(device, &message) {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

fn message([first, len, host]: [u64; 3], access: u8, kind: u8) -> [u8; LEN] {
    let mut message = [0; LEN];
    let mut put = |at: usize, bytes: &[u8]| message[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &IOTLB_V2.to_ne_bytes());
    put(8, &first.to_ne_bytes());
    put(16, &len.to_ne_bytes());
    put(24, &host.to_ne_bytes());
    put(32, &[access, kind]);
    message
}

fn parse(message: &[u8; LEN]) -> Option<Miss> {
    let (kind, rest) = message.split_first_chunk()?;
    let (address, _) = rest.get(4..)?.split_first_chunk()?;
    let [access, about] = message.get(32..34)? else { return None };
    let access = match access & (READ | WRITE) {
        READ => Permissions::Read,
        WRITE => Permissions::Write,
        _ => Permissions::ReadWrite,
    };
    let is_miss = u32::from_ne_bytes(*kind) == IOTLB_V2 && *about == MISS;
    is_miss.then_some(Miss { address: u64::from_ne_bytes(*address), access })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_have_the_layout_of_the_kernel() {
        let message = message([0x1122, 0x2000, 0x7f00_0000_1000], READ | WRITE, UPDATE);
        assert_eq!(message[..16], [2, 0, 0, 0, 0, 0, 0, 0, 0x22, 0x11, 0, 0, 0, 0, 0, 0]);
        assert_eq!(message[16..36], [0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0x7f, 0, 0, 3, 2, 0, 0]);
        assert!(message[36..].iter().all(|byte| *byte == 0));
        assert_eq!(parse(&message), None, "no miss");
        let mut miss = self::message([0x1122, 0, 0], WRITE, MISS);
        assert_eq!(parse(&miss), Some(Miss { address: 0x1122, access: Permissions::Write }));
        miss[0] = 1;
        assert_eq!(parse(&miss), None, "of the first kind");
    }

    #[test]
    fn what_the_kernel_asks_is_read_until_there_is_nothing() {
        let (near, far) = crate::net::testing::sockets();
        let near = std::os::fd::AsFd::as_fd(&near);
        assert_eq!(read_miss(near).unwrap(), None);
        rustix::io::write(&far, &message([0x3000, 0, 0], READ, MISS)).unwrap();
        assert_eq!(read_miss(near).unwrap(), Some(Miss { address: 0x3000, access: Permissions::Read }));
        invalidate(near, 0, u64::MAX).unwrap();
        let mut told = [0; LEN];
        rustix::io::read(&far, &mut told).unwrap();
        assert_eq!(told, message([0, u64::MAX, 0], 0, INVALIDATE));
    }
}
