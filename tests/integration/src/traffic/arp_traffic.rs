//! Traffic through many NICs at once, without a process in the guest for each.

use std::ffi::CString;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::host::tap::HostTap;

/// The probes' source address, a locally administered one.
const SOURCE: [u8; 6] = [0x02, 0, 0, 0, 0, 0xfe];

/// Sends ARP probes into taps, one after the other, until dropped. Linux answers each through the NIC on which it
/// arrived, whatever addresses that NIC has, if the target is any address of the guest: one frame each way.
pub struct ArpTraffic {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl ArpTraffic {
    /// Sends a probe for `target` into the next of `taps` every `pause`.
    pub fn start(taps: &[HostTap], target: Ipv4Addr, pause: Duration) -> ArpTraffic {
        let socket = packet_socket();
        let taps: Vec<libc::sockaddr_ll> = taps.iter().map(|tap| address(tap.name())).collect();
        let frame = probe(target);
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            for tap in taps.iter().cycle() {
                if stopped.load(Ordering::Relaxed) {
                    return;
                }
                // The tap of a function without a running driver accepts frames until its queue is full.
                let _ = send(&socket, &frame, tap);
                thread::sleep(pause);
            }
        });
        ArpTraffic { stop, thread: Some(thread) }
    }
}

impl Drop for ArpTraffic {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// An ARP probe (RFC 5227): a request without a sender's address.
fn probe(target: Ipv4Addr) -> Vec<u8> {
    let mut frame = vec![0xff; 6];
    frame.extend(SOURCE);
    // ARP; Ethernet and IPv4, of 6 and 4 bytes; a request.
    frame.extend([0x08, 0x06, 0, 1, 0x08, 0, 6, 4, 0, 1]);
    frame.extend(SOURCE);
    frame.extend([0; 4 + 6]);
    frame.extend(target.octets());
    frame.resize(60, 0);
    frame
}

pub(crate) fn address(interface: &str) -> libc::sockaddr_ll {
    let name = CString::new(interface).unwrap();
    // SAFETY: the name ends with a NUL and outlives the call.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    assert_ne!(index, 0, "there is no interface {interface}");
    // SAFETY: sockaddr_ll is plain data for which zero is valid.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as libc::sa_family_t;
    address.sll_ifindex = index as i32;
    address
}

pub(crate) fn packet_socket() -> OwnedFd {
    // SAFETY: socket has no memory effects. With protocol 0 it receives nothing.
    let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
    assert!(fd >= 0, "opening a packet socket: {}", std::io::Error::last_os_error());
    // SAFETY: the descriptor was just opened and has no other owner.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

fn send(socket: &OwnedFd, frame: &[u8], to: &libc::sockaddr_ll) -> std::io::Result<()> {
    let length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
    // SAFETY: both pointers point to memory of the given lengths, which the call only reads.
    let sent = unsafe {
        libc::sendto(
            socket.as_raw_fd(),
            frame.as_ptr().cast(),
            frame.len(),
            libc::MSG_DONTWAIT,
            std::ptr::from_ref(to).cast(),
            length,
        )
    };
    if sent < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}
