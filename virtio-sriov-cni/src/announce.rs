//! Announcements of a container's addresses, for neighbours that still have those of another interface.

use std::io;
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddrV6};
use std::os::fd::OwnedFd;

use rustix::net::addr::SocketAddrStorage;
use rustix::net::ipproto::ICMPV6;
use rustix::net::sockopt::set_ipv6_multicast_hops;
use rustix::net::{AddressFamily, Protocol, SendFlags, SocketAddrAny, SocketFlags, SocketType};
use rustix::net::{bind, sendto, socket_with};
use vm_api::config::mac::MacAddress;

use crate::netlink::Link;

/// EtherType of ARP (`RFC 826`).
const ARP: u16 = 0x0806;
/// All nodes on the link (`RFC 4291 §2.7.1`).
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);

/// Sends a gratuitous ARP or an unsolicited neighbour advertisement for each address, in the namespace of the calling
/// thread.
///
/// # Errors
///
/// Errors of the system calls.
pub(crate) fn announce(link: &Link, addresses: &[IpAddr]) -> io::Result<()> {
    let Some(mac) = link.mac else { return Ok(()) };
    let of_arp = |address: &IpAddr| if let IpAddr::V4(address) = address { Some(*address) } else { None };
    let v4: Vec<_> = addresses.iter().filter_map(of_arp).collect();
    if !v4.is_empty() {
        arp(link.index, mac, &v4)?;
    }
    for address in addresses {
        if let IpAddr::V6(address) = address {
            advertise(link.index, mac, *address)?;
        }
    }
    Ok(())
}

/// A gratuitous ARP request for each address (`RFC 5227 §3`). They share a socket, because Linux takes some
/// milliseconds to close one of packets.
fn arp(index: u32, mac: MacAddress, addresses: &[Ipv4Addr]) -> io::Result<()> {
    let socket = open(AddressFamily::PACKET, SocketType::RAW, None)?;
    for address in addresses {
        sendto(&socket, &arp_frame(mac, *address), SendFlags::empty(), &packet_address(index)?)?;
    }
    Ok(())
}

fn arp_frame(mac: MacAddress, address: Ipv4Addr) -> Vec<u8> {
    let mut frame = Vec::with_capacity(42);
    frame.extend([0xff; 6]);
    frame.extend(mac.0);
    frame.extend(ARP.to_be_bytes());
    // Ethernet, IPv4, lengths of their addresses, a request.
    frame.extend([0, 1, 8, 0, 6, 4, 0, 1]);
    frame.extend(mac.0);
    frame.extend(address.octets());
    frame.extend([0; 6]);
    frame.extend(address.octets());
    frame
}

/// The address of an interface for frames (`packet(7)`).
fn packet_address(index: u32) -> io::Result<SocketAddrAny> {
    let address = libc::sockaddr_ll {
        sll_family: libc::AF_PACKET as u16,
        sll_protocol: ARP.to_be(),
        sll_ifindex: index.try_into().map_err(io::Error::other)?,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    };
    let mut storage = MaybeUninit::<SocketAddrStorage>::zeroed();
    // SAFETY: the storage is larger than any address of a socket, and aligned for each.
    unsafe { storage.as_mut_ptr().cast::<libc::sockaddr_ll>().write(address) };
    let len = size_of::<libc::sockaddr_ll>() as u32;
    // SAFETY: the storage begins with a valid address of this length.
    Ok(unsafe { SocketAddrAny::new(storage, len) })
}

/// An unsolicited neighbour advertisement (`RFC 4861 §7.2.6`). The kernel computes its checksum (`RFC 3542 §3.1`).
fn advertise(index: u32, mac: MacAddress, address: Ipv6Addr) -> io::Result<()> {
    let socket = open(AddressFamily::INET6, SocketType::RAW, Some(ICMPV6))?;
    // Receivers check that no router has forwarded it (`RFC 4861 §7.1.2`).
    set_ipv6_multicast_hops(&socket, 255)?;
    bind(&socket, &SocketAddrV6::new(address, 0, 0, index))?;
    let to = SocketAddrV6::new(ALL_NODES, 0, 0, index);
    sendto(&socket, &advertisement(mac, address), SendFlags::empty(), &to)?;
    Ok(())
}

fn advertisement(mac: MacAddress, address: Ipv6Addr) -> Vec<u8> {
    // Type 136, and the flag to override what a neighbour has.
    let mut message = vec![136, 0, 0, 0, 0x20, 0, 0, 0];
    message.extend(address.octets());
    // Option: the link-layer address of the target, in units of 8 bytes.
    message.extend([2, 1]);
    message.extend(mac.0);
    message
}

fn open(family: AddressFamily, kind: SocketType, protocol: Option<Protocol>) -> io::Result<OwnedFd> {
    Ok(socket_with(family, kind, SocketFlags::CLOEXEC, protocol)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: MacAddress = MacAddress([0x52, 0x54, 0, 0, 1, 0xaa]);

    #[test]
    fn a_gratuitous_arp_names_one_address_twice() {
        let frame = arp_frame(MAC, Ipv4Addr::new(10, 0, 0, 5));
        assert_eq!(frame.len(), 42);
        assert_eq!(frame[6..12], MAC.0);
        assert_eq!(frame[12..22], [8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
        assert_eq!(frame[22..28], MAC.0);
        assert_eq!((&frame[28..32], &frame[38..42]), (&[10, 0, 0, 5][..], &[10, 0, 0, 5][..]));
    }

    #[test]
    fn an_advertisement_overrides_and_has_the_new_mac() {
        let message = advertisement(MAC, "2001:db8::5".parse().unwrap());
        assert_eq!((message.len(), message[0], message[4]), (32, 136, 0x20));
        assert_eq!(message[24..], [2, 1, 0x52, 0x54, 0, 0, 1, 0xaa]);
    }
}
