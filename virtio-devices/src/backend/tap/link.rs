//! The network interface of a tap, as the host sees it.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use super::request::{Request, call_with_ref};
use super::{TapError, TapSpec};

const UP: u16 = libc::IFF_UP as u16;

/// An interface, by name.
pub struct Link<'a> {
    name: &'a str,
    socket: OwnedFd,
}

/// `struct in6_ifreq`.
#[repr(C)]
struct Ipv6Request {
    address: [u8; 16],
    prefix: u32,
    index: i32,
}

impl<'a> Link<'a> {
    /// The interface `name`, which need not exist.
    pub fn new(name: &'a str) -> io::Result<Self> {
        Ok(Self { name, socket: socket(AddressFamily::INET)? })
    }

    /// Whether it exists.
    pub fn exists(&self) -> bool {
        self.get(libc::SIOCGIFFLAGS).is_ok()
    }

    /// Its MTU in bytes.
    pub fn mtu(&self) -> io::Result<u16> {
        let mtu = self.get(libc::SIOCGIFMTU)?.number();
        Ok(u16::try_from(mtu).unwrap_or(u16::MAX))
    }

    /// Whether it is up and somebody has one of its queues open.
    pub fn has_carrier(&self) -> io::Result<bool> {
        Request::new(self.name).has_link(self.socket.as_fd())
    }

    /// Makes it what `spec` says, and brings it up. What is so already is left alone, since changing it needs a privilege.
    pub fn configure(&self, spec: &TapSpec) -> Result<(), TapError> {
        let wrong = |what| move |source| TapError::Configure { name: self.name.into(), what, source };
        if let Some(mac) = spec.host_mac {
            self.set_mac(mac).map_err(wrong("the MAC address"))?;
        }
        if let Some(mtu) = spec.mtu {
            self.set_mtu(mtu).map_err(wrong("the MTU"))?;
        }
        let host_alone = |ip| match ip {
            IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::BROADCAST),
            IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::from_bits(u128::MAX)),
        };
        match spec.ip.map(|ip| (ip, spec.mask.unwrap_or_else(|| host_alone(ip)))) {
            Some((IpAddr::V4(ip), IpAddr::V4(mask))) if is_network_mask(mask.into()) => {
                self.set_ipv4(ip, mask).map_err(wrong("the address"))?;
            }
            Some((IpAddr::V6(ip), IpAddr::V6(mask))) if is_network_mask(mask.into()) => {
                self.set_ipv6(ip, mask).map_err(wrong("the address"))?;
            }
            Some((ip, mask)) => return Err(TapError::Mask { ip, mask }),
            None => {}
        }
        self.set_up().map_err(wrong("the state (up)"))
    }

    fn get(&self, number: libc::Ioctl) -> io::Result<Request> {
        let mut request = Request::new(self.name);
        request.call(self.socket.as_fd(), number)?;
        Ok(request)
    }

    fn set_up(&self) -> io::Result<()> {
        let mut request = self.get(libc::SIOCGIFFLAGS)?;
        if request.flags() & UP != 0 {
            return Ok(());
        }
        request.set_flags(request.flags() | UP);
        request.call(self.socket.as_fd(), libc::SIOCSIFFLAGS)
    }

    fn set_mac(&self, mac: [u8; 6]) -> io::Result<()> {
        let mut request = self.get(libc::SIOCGIFHWADDR)?;
        if request.mac() == mac {
            return Ok(());
        }
        request.set_mac(mac);
        request.call(self.socket.as_fd(), libc::SIOCSIFHWADDR)
    }

    fn set_mtu(&self, mtu: u16) -> io::Result<()> {
        if self.mtu()? == mtu {
            return Ok(());
        }
        let mut request = Request::new(self.name);
        request.set_number(mtu.into());
        request.call(self.socket.as_fd(), libc::SIOCSIFMTU)
    }

    fn set_ipv4(&self, ip: Ipv4Addr, mask: Ipv4Addr) -> io::Result<()> {
        for (get, set, address) in
            [(libc::SIOCGIFADDR, libc::SIOCSIFADDR, ip), (libc::SIOCGIFNETMASK, libc::SIOCSIFNETMASK, mask)]
        {
            // An interface without an address has none to read.
            if self.get(get).is_ok_and(|request| request.ipv4() == address) {
                continue;
            }
            let mut request = Request::new(self.name);
            request.set_ipv4(address);
            request.call(self.socket.as_fd(), set)?;
        }
        Ok(())
    }

    fn set_ipv6(&self, ip: Ipv6Addr, mask: Ipv6Addr) -> io::Result<()> {
        let index = self.get(libc::SIOCGIFINDEX)?.number();
        let request = Ipv6Request { address: ip.octets(), prefix: mask.to_bits().leading_ones(), index };
        match call_with_ref(socket(AddressFamily::INET6)?.as_fd(), libc::SIOCSIFADDR, &request) {
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(()),
            result => result,
        }
    }
}

fn socket(family: AddressFamily) -> io::Result<OwnedFd> {
    Ok(socket_with(family, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?)
}

/// Whether `mask` is ones followed by zeros.
pub fn is_network_mask(mask: IpAddr) -> bool {
    match mask {
        IpAddr::V4(mask) => mask.to_bits().leading_ones() == mask.to_bits().count_ones(),
        IpAddr::V6(mask) => mask.to_bits().leading_ones() == mask.to_bits().count_ones(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_is_ones_followed_by_zeros() {
        for mask in ["255.255.255.0", "255.255.255.255", "0.0.0.0", "ffff:ffff::", "::"] {
            assert!(is_network_mask(mask.parse().unwrap()), "{mask}");
        }
        for mask in ["255.0.255.0", "0.0.0.1", "::1", "ffff::ffff"] {
            assert!(!is_network_mask(mask.parse().unwrap()), "{mask}");
        }
    }

    #[test]
    fn the_loopback_interface_exists_and_one_with_an_odd_name_does_not() {
        assert!(Link::new("lo").unwrap().exists());
        assert!(!Link::new("no-such-link").unwrap().exists());
        assert!(Link::new("no-such-link").unwrap().mtu().is_err());
    }
}
