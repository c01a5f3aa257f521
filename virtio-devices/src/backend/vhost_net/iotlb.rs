//! The messages by which the kernel's vhost asks what addresses of a function stand for, and is told
//! (Linux, `include/uapi/linux/vhost_types.h`, `struct vhost_msg_v2`).

use std::io;
use std::os::fd::BorrowedFd;

use rustix::io::Errno;

pub(super) use crate::backend::iotlb::Miss;
use crate::backend::iotlb::{self, LEN as SAID};
use crate::backend::mapping::Mapping;

/// The length of a message: its kind, 4 bytes of no use here, and a union whose largest member has 64 bytes.
const LEN: usize = 72;
/// Where the union is.
const UNION: usize = 8;
/// A message of the second kind about a translation.
const IOTLB_V2: u32 = 2;

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
    write(device, iotlb::update(mapping, mapping.access()))
}

/// Has the kernel forget what is in a range, and all that reaches into it. When this returns, no queue uses it.
///
/// # Errors
///
/// When the kernel does not take the message.
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

    /// A question about `address`, which was to be read.
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
    fn what_the_kernel_asks_is_read_until_there_is_nothing() {
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
