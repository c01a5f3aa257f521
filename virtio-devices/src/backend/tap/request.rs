//! `struct ifreq`, and the ioctls that take one.

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, BorrowedFd};

/// The length of a name with its final zero (`IFNAMSIZ`).
const NAME: usize = 16;
const DATA: usize = 24;

/// An interface's name and up to 24 bytes, of which each ioctl has its own notion.
#[repr(C)]
#[derive(Debug, Clone)]
pub struct Request {
    name: [u8; NAME],
    data: [u8; DATA],
}

impl Request {
    /// A request about the interface `name`, of which 15 bytes count.
    pub fn new(name: &str) -> Self {
        let mut request = Self { name: [0; NAME], data: [0; DATA] };
        for (to, from) in request.name[..NAME - 1].iter_mut().zip(name.bytes()) {
            *to = from;
        }
        request
    }

    /// The interface's name.
    pub fn name(&self) -> String {
        let end = self.name.iter().position(|byte| *byte == 0).unwrap_or(NAME);
        String::from_utf8_lossy(&self.name[..end]).into_owned()
    }

    /// The flags, as most ioctls have them first.
    pub fn flags(&self) -> u16 {
        u16::from_ne_bytes([self.data[0], self.data[1]])
    }

    /// Sets the flags.
    pub fn set_flags(&mut self, flags: u16) {
        self.data[..2].copy_from_slice(&flags.to_ne_bytes());
    }

    /// The number, as an MTU or an index.
    pub fn number(&self) -> i32 {
        i32::from_ne_bytes([self.data[0], self.data[1], self.data[2], self.data[3]])
    }

    /// Sets the number.
    pub fn set_number(&mut self, number: i32) {
        self.data[..4].copy_from_slice(&number.to_ne_bytes());
    }

    /// The Ethernet address of a `sockaddr`.
    pub fn mac(&self) -> [u8; 6] {
        let [_, _, a, b, c, d, e, f, ..] = self.data;
        [a, b, c, d, e, f]
    }

    /// Sets a `sockaddr` with an Ethernet address.
    pub fn set_mac(&mut self, mac: [u8; 6]) {
        self.set_flags(libc::ARPHRD_ETHER);
        self.data[2..8].copy_from_slice(&mac);
    }

    /// The address of a `sockaddr_in`.
    pub fn ipv4(&self) -> Ipv4Addr {
        Ipv4Addr::new(self.data[4], self.data[5], self.data[6], self.data[7])
    }

    /// Sets a `sockaddr_in`.
    pub fn set_ipv4(&mut self, address: Ipv4Addr) {
        self.set_flags(libc::AF_INET as u16);
        self.data[4..8].copy_from_slice(&address.octets());
    }

    /// Sets a pointer, as `SIOCETHTOOL` has it.
    fn set_pointer<T>(&mut self, pointer: *mut T) {
        self.data[..size_of::<usize>()].copy_from_slice(&(pointer as usize).to_ne_bytes());
    }

    /// Makes the ioctl `number` of a socket or of the tun driver that takes a `struct ifreq`.
    pub fn call(&mut self, fd: BorrowedFd<'_>, number: libc::Ioctl) -> io::Result<()> {
        // SAFETY: the kernel reads and writes at most a `struct ifreq`, which is as long as `Self`. Requests with a pointer are
        // made by `has_link` only.
        check(unsafe { libc::ioctl(fd.as_raw_fd(), number, std::ptr::from_mut(self)) })
    }

    /// Whether the interface is up and has a carrier (`ETHTOOL_GLINK`).
    pub fn has_link(&mut self, socket: BorrowedFd<'_>) -> io::Result<bool> {
        const ETHTOOL_GLINK: u32 = 0x0a;
        let mut value = [ETHTOOL_GLINK, 0];
        self.set_pointer(value.as_mut_ptr());
        self.call(socket, libc::SIOCETHTOOL)?;
        // The kernel has written to it behind the compiler's back.
        Ok(std::hint::black_box(value)[1] != 0)
    }
}

/// An ioctl with a number as its argument.
pub fn call_with_value(fd: BorrowedFd<'_>, number: libc::Ioctl, value: libc::c_ulong) -> io::Result<()> {
    // SAFETY: the callers' ioctls take a plain number.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), number, value) })
}

/// An ioctl that reads an argument.
pub fn call_with_ref<T>(fd: BorrowedFd<'_>, number: libc::Ioctl, argument: &T) -> io::Result<()> {
    // SAFETY: the callers' ioctls read a `T`.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), number, std::ptr::from_ref(argument)) })
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

const _: () = assert!(size_of::<Request>() == 40, "the size of the kernel's struct ifreq");
