//! The host's side: a network namespace, its interfaces, and frames on them.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::Command;

use rustix::thread::{CapabilitySet, CapabilitySets, UnshareFlags, set_capabilities, unshare_unsafe};
use virtio_devices::TapSpec;

use crate::driver::eventually;

/// Puts this thread, and those it starts, into namespaces of their own.
pub(crate) fn new_namespace() {
    std::fs::File::open("/dev/net/tun").expect("this test needs /dev/net/tun: modprobe tun, and run as root");
    crate::namespace::enter();
}

/// Puts this thread into a further network namespace.
pub(crate) fn another_network() {
    // SAFETY: a new network namespace leaves memory and open files alone.
    unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.unwrap();
}

/// Runs `ip` with these arguments, separated by spaces, and returns what it prints.
pub(crate) fn ip(arguments: &str) -> String {
    let output = Command::new("ip").args(arguments.split(' ')).output().expect("this test needs ip: install iproute2");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "ip {arguments}: {error}");
    String::from_utf8(output.stdout).unwrap()
}

/// True if the interface `name` exists.
pub(crate) fn exists(name: &str) -> bool {
    ip("-o link").contains(&format!(": {name}:"))
}

/// Waits until the interface `name` is gone. A process that another test starts has the descriptors of this one's taps
/// until its program begins.
pub(crate) fn wait_gone(name: &str) {
    eventually("the end of the tap", || !exists(name));
}

/// The tap `name`, as it is or a new one, with this number of queues.
pub(crate) fn spec(name: &str, queue_pairs: u16) -> TapSpec {
    TapSpec { name: Some(name.into()), ip: None, mask: None, host_mac: None, mtu: None, queue_pairs }
}

/// All frames of one interface, as the host's network stack sees them.
pub(crate) struct Wire(OwnedFd);

impl Wire {
    pub(crate) fn new(name: &str) -> Self {
        let protocol = (libc::ETH_P_ALL as u16).to_be();
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: creates a descriptor.
        let fd = unsafe { libc::socket(libc::AF_PACKET, kind, protocol.into()) };
        assert!(fd >= 0, "a packet socket: {}", std::io::Error::last_os_error());
        // SAFETY: this is the only owner of the descriptor.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: the address is plain data, of which zero is a value.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = protocol;
        address.sll_ifindex = index(name);
        let len = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        // SAFETY: the address is as long as `len` says.
        let bound = unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), len) };
        assert_eq!(bound, 0, "binding a packet socket: {}", std::io::Error::last_os_error());
        Self(fd)
    }

    /// Sends a frame to the program that has the tap open.
    pub(crate) fn send(&self, frame: &[u8]) {
        assert_eq!(rustix::io::write(&self.0, frame).unwrap(), frame.len());
    }

    /// Lets [`Self::send_segment`] be used.
    pub(crate) fn offloading(name: &str) -> Self {
        const PACKET_VNET_HDR: libc::c_int = 15;
        let wire = Self::new(name);
        let on: libc::c_int = 1;
        let len = size_of::<libc::c_int>() as libc::socklen_t;
        let fd = wire.0.as_raw_fd();
        // SAFETY: the option's value is an int.
        let set = unsafe { libc::setsockopt(fd, libc::SOL_PACKET, PACKET_VNET_HDR, (&raw const on).cast(), len) };
        assert_eq!(set, 0, "headers on a packet socket: {}", std::io::Error::last_os_error());
        wire
    }

    /// Sends a segment after a header of 10 bytes, as the host's own TCP does.
    pub(crate) fn send_segment(&self, header: [u8; 10], frame: &[u8]) {
        self.send(&[&header, frame].concat());
    }

    /// The next frame of ours: the host itself sends some, too, over IPv6.
    pub(crate) fn receive(&self) -> Option<Vec<u8>> {
        loop {
            let mut data = vec![0; 1 << 17];
            let len = rustix::io::read(&self.0, &mut data).ok()?;
            data.truncate(len);
            if data[12..14] == [8, 0] {
                return Some(data);
            }
        }
    }
}

fn index(name: &str) -> i32 {
    let name = std::ffi::CString::new(name).unwrap();
    // SAFETY: the name ends in a zero.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    i32::try_from(index).unwrap()
}

/// Runs `action` without any privilege, in a thread of its own: as the same user, who has no capability.
pub(crate) fn without_privilege<T: Send>(action: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let none = CapabilitySet::empty();
            let none = CapabilitySets { effective: none, permitted: none, inheritable: none };
            set_capabilities(None, none).expect("giving up capabilities");
            action()
        });
        thread.join().unwrap()
    })
}
