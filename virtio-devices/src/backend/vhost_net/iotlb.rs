//! The IOTLB messages that the kernel's vhost sends and receives (Linux, `include/uapi/linux/vhost_types.h`,
//! `struct vhost_msg_v2`).

use std::io;
use std::os::fd::BorrowedFd;

use rustix::io::Errno;

pub(super) use crate::backend::iotlb::Miss;
use crate::backend::iotlb::{self, LEN as SAID};
use crate::backend::mapping::Mapping;

/// The length of a message: its kind, 4 unused bytes, and a union whose largest member has 64 bytes.
const LEN: usize = 72;
/// The offset of the union.
const UNION: usize = 8;
/// The type of an IOTLB message, version 2.
const IOTLB_V2: u32 = 2;

/// Reads the kernel's next miss. `None` if there is none.
///
/// # Errors
///
/// Fails if it cannot be read.
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

/// Sends a mapping to the kernel. Queues that wait for it continue.
///
/// # Errors
///
/// Fails if the kernel has no memory for it.
pub(super) fn update(device: BorrowedFd<'_>, mapping: &Mapping) -> io::Result<()> {
    write(device, iotlb::update(mapping, mapping.access()))
}

/// Invalidates a range in the kernel, and every mapping that overlaps it. On return, no queue uses it.
///
/// # Errors
///
/// Fails if the kernel does not accept the message.
pub(super) fn invalidate(device: BorrowedFd<'_>, first: u64, last: u64) -> io::Result<()> {
    write(device, iotlb::invalidate(first, last))
}

fn write(device: BorrowedFd<'_>, said: [u8; SAID]) -> io::Result<()> {
    let message = message(said);
    loop {
        match rustix::io::write(device, &message) {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

fn message(said: [u8; SAID]) -> [u8; LEN] {
    let mut message = [0; LEN];
    message[..4].copy_from_slice(&IOTLB_V2.to_ne_bytes());
    message[UNION..UNION + SAID].copy_from_slice(&said);
    message
}

fn parse(message: &[u8; LEN]) -> Option<Miss> {
    let kind = message.first_chunk().map(|kind| u32::from_ne_bytes(*kind));
    Miss::parse(message.get(UNION..)?).filter(|_| kind == Some(IOTLB_V2))
}

#[cfg(test)]
mod tests {
    use vm_memory::Permissions;

    use super::*;

    /// A miss of a read of `address`.
    fn miss(address: u64) -> [u8; LEN] {
        let mut said = [0; SAID];
        said[..8].copy_from_slice(&address.to_ne_bytes());
        said[24..26].copy_from_slice(&[1, 1]);
        message(said)
    }

    #[test]
    fn messages_have_the_layout_of_the_kernel() {
        let message = message(iotlb::update(&Mapping::for_test(0x1122, 0x2000), Permissions::ReadWrite));
        assert_eq!(message[..16], [2, 0, 0, 0, 0, 0, 0, 0, 0x22, 0x11, 0, 0, 0, 0, 0, 0]);
        assert_eq!(message[16..36], [0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 0, 0, 3, 2, 0, 0]);
        assert!(message[36..].iter().all(|byte| *byte == 0));
        assert_eq!(parse(&message), None, "no miss");
        let mut miss = miss(0x1122);
        assert_eq!(parse(&miss), Some(Miss { address: 0x1122, access: Permissions::Read }));
        miss[0] = 1;
        assert_eq!(parse(&miss), None, "of the first kind");
    }

    #[test]
    fn requests_of_the_kernel_are_read_until_there_are_none() {
        let (near, far) = crate::net::testing::sockets();
        let near = std::os::fd::AsFd::as_fd(&near);
        assert_eq!(read_miss(near).unwrap(), None);
        rustix::io::write(&far, &miss(0x3000)).unwrap();
        assert_eq!(read_miss(near).unwrap(), Some(Miss { address: 0x3000, access: Permissions::Read }));
        invalidate(near, 0, u64::MAX).unwrap();
        let mut told = [0; LEN];
        rustix::io::read(&far, &mut told).unwrap();
        assert_eq!(told, message(iotlb::invalidate(0, u64::MAX)));
    }
}
