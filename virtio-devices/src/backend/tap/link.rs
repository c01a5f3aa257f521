//! A tap's network interface on the host.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, OwnedFd};

use rustix::net::AddressFamily;

use super::error::TapError;
use super::ioctl::{Ifreq, IfreqIoctl, add_ipv6_address, socket};
use super::spec::TapSpec;

const UP: u16 = libc::IFF_UP as u16;

/// An interface, by name.
pub(crate) struct Link<'a> {
    name: &'a str,
    socket: OwnedFd,
}

impl<'a> Link<'a> {
    /// The interface `name`, which need not exist.
    pub(crate) fn new(name: &'a str) -> io::Result<Self> {
        Ok(Self { name, socket: socket(AddressFamily::INET)? })
    }

    /// True if the interface exists.
    pub(crate) fn exists(&self) -> bool {
        self.get(IfreqIoctl::GET_FLAGS).is_ok()
    }

    /// The MTU in bytes.
    pub(crate) fn mtu(&self) -> io::Result<u16> {
        let mtu = self.get(IfreqIoctl::GET_MTU)?.number();
        Ok(u16::try_from(mtu).unwrap_or(u16::MAX))
    }

    /// True if the interface is up and one of its queues is open.
    pub(crate) fn has_carrier(&self) -> io::Result<bool> {
        Ifreq::new(self.name).has_link(self.socket.as_fd())
    }

    /// Applies `spec` and brings the interface up. Settings that are already correct are not written, because that
    /// needs a privilege.
    pub(crate) fn configure(&self, spec: &TapSpec) -> Result<(), TapError> {
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

    fn get(&self, ioctl: IfreqIoctl) -> io::Result<Ifreq> {
        let mut request = Ifreq::new(self.name);
        request.call(self.socket.as_fd(), ioctl)?;
        Ok(request)
    }

    fn set_up(&self) -> io::Result<()> {
        let mut request = self.get(IfreqIoctl::GET_FLAGS)?;
        if request.flags() & UP != 0 {
            return Ok(());
        }
        request.set_flags(request.flags() | UP);
        request.call(self.socket.as_fd(), IfreqIoctl::SET_FLAGS)
    }

    fn set_mac(&self, mac: [u8; 6]) -> io::Result<()> {
        let mut request = self.get(IfreqIoctl::GET_MAC)?;
        if request.mac() == mac {
            return Ok(());
        }
        request.set_mac(mac);
        request.call(self.socket.as_fd(), IfreqIoctl::SET_MAC)
    }

    fn set_mtu(&self, mtu: u16) -> io::Result<()> {
        if self.mtu()? == mtu {
            return Ok(());
        }
        let mut request = Ifreq::new(self.name);
        request.set_number(mtu.into());
        request.call(self.socket.as_fd(), IfreqIoctl::SET_MTU)
    }

    fn set_ipv4(&self, ip: Ipv4Addr, mask: Ipv4Addr) -> io::Result<()> {
        for (get, set, address) in [
            (IfreqIoctl::GET_IPV4, IfreqIoctl::SET_IPV4, ip),
            (IfreqIoctl::GET_IPV4_MASK, IfreqIoctl::SET_IPV4_MASK, mask),
        ] {
            // Fails for an interface without an address.
            if self.get(get).is_ok_and(|request| request.ipv4() == address) {
                continue;
            }
            let mut request = Ifreq::new(self.name);
            request.set_ipv4(address);
            request.call(self.socket.as_fd(), set)?;
        }
        Ok(())
    }

    fn set_ipv6(&self, ip: Ipv6Addr, mask: Ipv6Addr) -> io::Result<()> {
        let index = self.get(IfreqIoctl::GET_INDEX)?.number();
        let prefix = mask.to_bits().leading_ones();
        match add_ipv6_address(index, ip, prefix) {
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(()),
            result => result,
        }
    }
}

/// True if `mask` is ones followed by zeros.
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
    fn loopback_exists_and_an_unknown_interface_does_not() {
        assert!(Link::new("lo").unwrap().exists());
        assert!(!Link::new("no-such-link").unwrap().exists());
        assert!(Link::new("no-such-link").unwrap().mtu().is_err());
    }
}
