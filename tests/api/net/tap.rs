//! Taps of another process.

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::Command;

/// The queue mode of a tap.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Queues {
    One,
    Many,
}

/// Opens a queue of the tap `name`.
pub(crate) fn queue(name: &str, queues: Queues) -> OwnedFd {
    fixtures::namespace::enter();
    let file = File::options().read(true).write(true).open("/dev/net/tun").unwrap();
    // `struct ifreq`: the name in 16 bytes, followed by the flags, 40 bytes in all.
    let mut request = [0u8; 40];
    request[..name.len()].copy_from_slice(name.as_bytes());
    let many = if queues == Queues::Many { libc::IFF_MULTI_QUEUE } else { 0 };
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | many;
    request[16..18].copy_from_slice(&(flags as u16).to_ne_bytes());
    // SAFETY: the kernel reads and writes a `struct ifreq`, which is as long as `request`.
    let done = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, request.as_mut_ptr()) };
    assert_eq!(done, 0, "{name}: {}", std::io::Error::last_os_error());
    file.into()
}

/// A persistent tap of root, removed when this is dropped.
pub(crate) struct Kept(String);

impl Kept {
    /// Creates the tap and brings it up.
    pub(crate) fn new(name: &str) -> Self {
        Self::with(name, &[])
    }

    /// Creates a tap of several queues and brings it up.
    pub(crate) fn of_many_queues(name: &str) -> Self {
        Self::with(name, &["multi_queue"])
    }

    /// Creates a tap on which the host itself sends nothing, and brings it up.
    pub(crate) fn silent(name: &str) -> Self {
        let tap = Self::down(name, &[]);
        let knob = format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6");
        if std::path::Path::new(&knob).exists() {
            std::fs::write(&knob, "1").unwrap();
        }
        ip(&["link", "set", name, "up"]);
        tap
    }

    pub(crate) fn name(&self) -> &str {
        &self.0
    }

    fn with(name: &str, flags: &[&str]) -> Self {
        let tap = Self::down(name, flags);
        ip(&["link", "set", name, "up"]);
        tap
    }

    fn down(name: &str, flags: &[&str]) -> Self {
        let tap = Self(name.to_string());
        ip(&[&["tuntap", "add", name, "mode", "tap", "user", "root", "vnet_hdr"], flags].concat());
        tap
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["link", "del", &self.0]).status();
    }
}

/// Runs `ip` in the test's own network namespace.
pub(crate) fn ip(arguments: &[&str]) {
    fixtures::namespace::enter();
    assert!(Command::new("ip").args(arguments).status().unwrap().success(), "ip {arguments:?}");
}

/// Sends a frame to the interface `name` of the test's own network namespace.
pub(crate) fn send(name: &str, frame: &[u8]) {
    fixtures::namespace::enter();
    let index = std::fs::read_to_string(format!("/sys/class/net/{name}/ifindex")).unwrap();
    // SAFETY: all zeros are a valid address.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as libc::sa_family_t;
    address.sll_ifindex = index.trim().parse().unwrap();
    // SAFETY: creates a descriptor, which is checked and owned below.
    let socket = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
    assert!(socket >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: the descriptor is new.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    let (length, address) = (size_of_val(&address) as libc::socklen_t, (&raw const address).cast());
    // SAFETY: the kernel reads the frame and the address, which have these lengths.
    let sent = unsafe { libc::sendto(socket.as_raw_fd(), frame.as_ptr().cast(), frame.len(), 0, address, length) };
    // A queue that is full drops the frame.
    let is_full = sent < 0 && std::io::Error::last_os_error().raw_os_error() == Some(libc::ENOBUFS);
    assert!(is_full || sent == frame.len() as isize, "{name}: {}", std::io::Error::last_os_error());
}
