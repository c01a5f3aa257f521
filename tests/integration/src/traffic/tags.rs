//! VLAN tags of frames on an interface of the host.

use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use crate::traffic::arp_traffic::{address, packet_socket};

/// Frames that arrive on an interface of the host after this is created, with their tags.
pub struct Tags(OwnedFd);

impl Tags {
    /// Frames that arrive on `interface`.
    pub fn on(interface: &str) -> Tags {
        let (socket, mut place) = (packet_socket(), address(interface));
        place.sll_protocol = (libc::ETH_P_ALL as u16).to_be();
        let (on, length) = (1_i32, size_of::<libc::sockaddr_ll>() as libc::socklen_t);
        // SAFETY: the option has the given length, which the call only reads.
        let set = unsafe {
            let length = size_of_val(&on) as libc::socklen_t;
            libc::setsockopt(socket.as_raw_fd(), libc::SOL_PACKET, libc::PACKET_AUXDATA, (&raw const on).cast(), length)
        };
        // SAFETY: the address has the given length, which the call only reads.
        let bound = unsafe { libc::bind(socket.as_raw_fd(), (&raw const place).cast(), length) };
        assert_eq!((set, bound), (0, 0), "{interface}: {}", std::io::Error::last_os_error());
        Tags(socket)
    }

    /// Waits up to `limit` for a frame from the MAC address `source`. Returns its VLAN tag: the priority in the upper
    /// three bits, and the VLAN in the lower twelve; or 0 if it has none.
    pub fn of(&self, source: &str, limit: Duration) -> Option<u16> {
        let deadline = Instant::now() + limit;
        while let Some(left) = deadline.checked_duration_since(Instant::now()) {
            let mut wait = libc::pollfd { fd: self.0.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: it is one pollfd.
            unsafe { libc::poll(&raw mut wait, 1, left.as_millis() as libc::c_int + 1) };
            if let Some((from, tag)) = self.next()
                && from == source
            {
                return Some(tag);
            }
        }
        None
    }

    /// The source and the tag of the next frame, if there is one.
    fn next(&self) -> Option<(String, u16)> {
        let (mut frame, mut control) = ([0_u8; 64], [0_u64; 8]);
        let mut part = libc::iovec { iov_base: frame.as_mut_ptr().cast(), iov_len: frame.len() };
        // SAFETY: msghdr is plain data for which zero is valid.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
        (message.msg_control, message.msg_controllen) = (control.as_mut_ptr().cast(), size_of_val(&control));
        // SAFETY: the message names buffers of the given lengths, which outlive the call.
        let length = unsafe { libc::recvmsg(self.0.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) };
        if length < 14 {
            return None;
        }
        let from: Vec<String> = frame[6..12].iter().map(|byte| format!("{byte:02x}")).collect();
        // SAFETY: the kernel has written the control messages of this message into a buffer that is large enough.
        let tag = unsafe {
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            let is_there = !header.is_null() && (*header).cmsg_type == libc::PACKET_AUXDATA;
            let data = is_there.then(|| libc::CMSG_DATA(header).cast::<libc::tpacket_auxdata>().read_unaligned());
            data.filter(|data| data.tp_status & libc::TP_STATUS_VLAN_VALID != 0).map(|data| data.tp_vlan_tci)
        };
        Some((from.join(":"), tag.unwrap_or(0)))
    }
}
