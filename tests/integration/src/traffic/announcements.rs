//! Announcements of addresses: ARP frames with which a host announces its place in the network (RFC 5227 §2.3).

use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use crate::traffic::arp_traffic::{address, packet_socket};

/// Announcements that arrive on an interface of the host after this is created.
pub struct Announcements(OwnedFd);

impl Announcements {
    /// Announcements that arrive on `interface`.
    pub fn on(interface: &str) -> Announcements {
        let (socket, mut place) = (packet_socket(), address(interface));
        place.sll_protocol = (libc::ETH_P_ARP as u16).to_be();
        let length = size_of_val(&place) as libc::socklen_t;
        // SAFETY: the address has the given length.
        let bound = unsafe { libc::bind(socket.as_raw_fd(), (&raw const place).cast(), length) };
        assert_eq!(bound, 0, "{interface}: {}", std::io::Error::last_os_error());
        Announcements(socket)
    }

    /// Waits up to `limit` for an announcement of `who`. Returns its MAC address.
    pub fn of(&self, who: Ipv4Addr, limit: Duration) -> Option<String> {
        let deadline = Instant::now() + limit;
        while let Some(left) = deadline.checked_duration_since(Instant::now()) {
            let mut wait = libc::pollfd { fd: self.0.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: it is one pollfd.
            unsafe { libc::poll(&raw mut wait, 1, left.as_millis() as libc::c_int + 1) };
            let mut frame = [0_u8; 64];
            // SAFETY: the buffer has the given length.
            let len =
                unsafe { libc::recv(self.0.as_raw_fd(), frame.as_mut_ptr().cast(), frame.len(), libc::MSG_DONTWAIT) };
            // ARP: the sender's and the target's IP addresses are at 28 and at 38; the MAC address is at 22.
            let is_arp = len >= 42 && frame[12..14] == [0x08, 0x06];
            if is_arp && frame[28..32] == who.octets() && frame[38..42] == who.octets() {
                let mac: Vec<String> = frame[22..28].iter().map(|byte| format!("{byte:02x}")).collect();
                return Some(mac.join(":"));
            }
        }
        None
    }
}
