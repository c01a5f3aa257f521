//! The ioctls of taps and interfaces, typed by their arguments, so that no caller can pass the kernel a wrong one.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

/// The length of a name with its final zero (`IFNAMSIZ`).
const NAME: usize = 16;
const DATA: usize = 24;

/// `struct ifreq`: an interface's name and 24 bytes, which each ioctl interprets in its own way.
#[repr(C)]
#[derive(Debug, Clone)]
pub(crate) struct Ifreq {
    name: [u8; NAME],
    data: [u8; DATA],
}

impl Ifreq {
    /// An argument about the interface `name`, which is cut after 15 bytes.
    pub(crate) fn new(name: &str) -> Self {
        let mut request = Self { name: [0; NAME], data: [0; DATA] };
        for (to, from) in request.name[..NAME - 1].iter_mut().zip(name.bytes()) {
            *to = from;
        }
        request
    }

    /// The interface's name.
    pub(crate) fn name(&self) -> String {
        let end = self.name.iter().position(|byte| *byte == 0).unwrap_or(NAME);
        String::from_utf8_lossy(&self.name[..end]).into_owned()
    }

    /// The flags, as most ioctls have them first.
    pub(crate) fn flags(&self) -> u16 {
        u16::from_ne_bytes([self.data[0], self.data[1]])
    }

    /// Sets the flags.
    pub(crate) fn set_flags(&mut self, flags: u16) {
        self.data[..2].copy_from_slice(&flags.to_ne_bytes());
    }

    /// The number, as an MTU or an index.
    pub(crate) fn number(&self) -> i32 {
        i32::from_ne_bytes([self.data[0], self.data[1], self.data[2], self.data[3]])
    }

    /// Sets the number.
    pub(crate) fn set_number(&mut self, number: i32) {
        self.data[..4].copy_from_slice(&number.to_ne_bytes());
    }

    /// The Ethernet address of a `sockaddr`.
    pub(crate) fn mac(&self) -> [u8; 6] {
        let [_, _, a, b, c, d, e, f, ..] = self.data;
        [a, b, c, d, e, f]
    }

    /// Sets a `sockaddr` with an Ethernet address.
    pub(crate) fn set_mac(&mut self, mac: [u8; 6]) {
        self.set_flags(libc::ARPHRD_ETHER);
        self.data[2..8].copy_from_slice(&mac);
    }

    /// The address of a `sockaddr_in`.
    pub(crate) fn ipv4(&self) -> Ipv4Addr {
        Ipv4Addr::new(self.data[4], self.data[5], self.data[6], self.data[7])
    }

    /// Sets a `sockaddr_in`.
    pub(crate) fn set_ipv4(&mut self, address: Ipv4Addr) {
        self.set_flags(libc::AF_INET as u16);
        self.data[4..8].copy_from_slice(&address.octets());
    }

    /// Makes the ioctl on a socket or on a queue of a tap.
    pub(crate) fn call(&mut self, fd: BorrowedFd<'_>, ioctl: IfreqIoctl) -> io::Result<()> {
        // SAFETY: by its type the ioctl reads and writes at most a `struct ifreq`, which is as long as `Self`, and
        // follows no pointer.
        check(unsafe { libc::ioctl(fd.as_raw_fd(), ioctl.0, std::ptr::from_mut(self)) })
    }

    /// True if the interface is up and has a carrier (`ETHTOOL_GLINK`).
    pub(crate) fn has_link(mut self, socket: BorrowedFd<'_>) -> io::Result<bool> {
        const ETHTOOL_GLINK: u32 = 0x0a;
        let mut value = [ETHTOOL_GLINK, 0];
        let pointer = value.as_mut_ptr().expose_provenance();
        self.data[..size_of::<usize>()].copy_from_slice(&pointer.to_ne_bytes());
        // SAFETY: the kernel reads a `struct ifreq`, and reads and writes the two numbers of `struct ethtool_value`
        // that it points to.
        check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL, std::ptr::from_mut(&mut self)) })?;
        // The kernel has written to it without the compiler's knowledge.
        Ok(std::hint::black_box(value)[1] != 0)
    }
}

/// An ioctl whose argument is a `struct ifreq` without pointers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct IfreqIoctl(libc::Ioctl);

impl IfreqIoctl {
    /// Reads an interface's flags.
    pub(crate) const GET_FLAGS: Self = Self(libc::SIOCGIFFLAGS);
    /// Sets an interface's flags.
    pub(crate) const SET_FLAGS: Self = Self(libc::SIOCSIFFLAGS);
    /// Reads an interface's MTU.
    pub(crate) const GET_MTU: Self = Self(libc::SIOCGIFMTU);
    /// Sets an interface's MTU.
    pub(crate) const SET_MTU: Self = Self(libc::SIOCSIFMTU);
    /// Reads an interface's Ethernet address.
    pub(crate) const GET_MAC: Self = Self(libc::SIOCGIFHWADDR);
    /// Sets an interface's Ethernet address.
    pub(crate) const SET_MAC: Self = Self(libc::SIOCSIFHWADDR);
    /// Reads an interface's IPv4 address.
    pub(crate) const GET_IPV4: Self = Self(libc::SIOCGIFADDR);
    /// Sets an interface's IPv4 address. Needs a socket of IPv4: one of IPv6 takes another argument.
    pub(crate) const SET_IPV4: Self = Self(libc::SIOCSIFADDR);
    /// Reads the mask of an interface's IPv4 address.
    pub(crate) const GET_IPV4_MASK: Self = Self(libc::SIOCGIFNETMASK);
    /// Sets the mask of an interface's IPv4 address.
    pub(crate) const SET_IPV4_MASK: Self = Self(libc::SIOCSIFNETMASK);
    /// Reads an interface's index.
    pub(crate) const GET_INDEX: Self = Self(libc::SIOCGIFINDEX);
    /// Attaches a queue to the tap of this name, creating the tap if necessary.
    pub(crate) const ATTACH: Self = Self(libc::TUNSETIFF);
    /// Reads name and flags of the tap that a queue is attached to.
    pub(crate) const GET_INTERFACE: Self = Self(libc::TUNGETIFF);
    /// Attaches or detaches a queue.
    pub(crate) const SET_QUEUE: Self = Self(libc::TUNSETQUEUE);
}

/// Makes a tap deliver offloaded frames of the kinds in `offloads`, bits of `TUN_F_*`.
pub(crate) fn set_offloads(queue: BorrowedFd<'_>, offloads: u32) -> io::Result<()> {
    // SAFETY: the argument is a number.
    check(unsafe { libc::ioctl(queue.as_raw_fd(), libc::TUNSETOFFLOAD, libc::c_ulong::from(offloads)) })
}

/// Sets the length in bytes of the header before each frame.
pub(crate) fn set_header_length(queue: BorrowedFd<'_>, len: libc::c_int) -> io::Result<()> {
    // SAFETY: the kernel reads an `int`, which lives through the call.
    check(unsafe { libc::ioctl(queue.as_raw_fd(), libc::TUNSETVNETHDRSZ, &raw const len) })
}

/// `struct in6_ifreq`.
#[repr(C)]
struct In6Ifreq {
    address: [u8; 16],
    prefix: u32,
    index: i32,
}

/// Adds an address to the interface with this index.
pub(crate) fn add_ipv6_address(index: i32, ip: Ipv6Addr, prefix: u32) -> io::Result<()> {
    let argument = In6Ifreq { address: ip.octets(), prefix, index };
    let socket = socket(AddressFamily::INET6)?;
    // SAFETY: on a socket of IPv6, the kernel reads a `struct in6_ifreq`.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFADDR, &raw const argument) })
}

/// A socket for configuring interfaces.
pub(crate) fn socket(family: AddressFamily) -> io::Result<OwnedFd> {
    Ok(socket_with(family, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?)
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

const _: () = assert!(size_of::<Ifreq>() == 40, "the size of the kernel's struct ifreq");
