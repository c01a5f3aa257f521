//! Requests to rtnetlink: interfaces, addresses and routes of the namespace in which the socket was opened.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use neli::consts::nl::NlmF;
use neli::consts::rtnl::{
    Arphrd, Ifa, IfaF, Iff, Ifla, RtAddrFamily, RtScope, RtTable, Rta, RtaType, Rtm, Rtn, Rtprot,
};
use neli::consts::socket::NlFamily;
use neli::err::SocketError;
use neli::nl::{NlPayload, Nlmsghdr, NlmsghdrBuilder};
use neli::rtnl::{
    Ifaddrmsg, IfaddrmsgBuilder, Ifinfomsg, IfinfomsgBuilder, Rtattr, RtattrBuilder, Rtmsg, RtmsgBuilder,
};
use neli::socket::synchronous::NlSocketHandle;
use neli::types::{Buffer, RtBuffer};
use neli::utils::Groups;
use neli::{FromBytesWithInput, Size, ToBytes};
use vm_api::config::mac::MacAddress;

use crate::net::{IpNet, from_octets, octets};
use crate::result::Route;

/// Attribute with the name of the interface's device (`linux/if_link.h`, `IFLA_PARENT_DEV_NAME`, Linux 5.14).
const PARENT: u16 = 56;
/// Further names of an interface (`linux/if_link.h`, `IFLA_PROP_LIST` and `IFLA_ALT_IFNAME`, Linux 5.5), and the
/// requests that add and remove them (`linux/rtnetlink.h`, `RTM_NEWLINKPROP` and `RTM_DELLINKPROP`).
const PROPERTIES: u16 = 52;
const ALTNAME: u16 = 53;
const NEW_PROPERTIES: u16 = 108;
const DELETE_PROPERTIES: u16 = 109;
/// The bits of an attribute's type that are no flags (`linux/netlink.h`, `NLA_TYPE_MASK` and `NLA_F_NESTED`).
const TYPE_MASK: u16 = 0x3fff;
const NESTED: u16 = 0x8000;
/// Metrics of a route (`linux/rtnetlink.h`, `RTAX_MTU` and `RTAX_ADVMSS`).
const METRIC_MTU: u16 = 2;
const METRIC_ADVMSS: u16 = 8;

/// An interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// Index in its namespace.
    pub index: u32,
    /// Name.
    pub name: String,
    /// True if it is set up.
    pub up: bool,
    /// Address, if it is one of Ethernet.
    pub mac: Option<MacAddress>,
    /// Longest packet in bytes.
    pub mtu: u32,
    /// Name of the device that has it, such as `virtio3`.
    pub parent: Option<String>,
    /// Alias.
    pub alias: Option<String>,
    /// Further names, which no other interface of its namespace has.
    pub altnames: Vec<String>,
}

/// Changes of an interface, all in one request.
#[derive(Debug, Default)]
pub struct Change<'a> {
    /// New name.
    pub name: Option<&'a str>,
    /// New address.
    pub mac: Option<MacAddress>,
    /// Sets it up.
    pub up: bool,
    /// New namespace.
    pub netns: Option<BorrowedFd<'a>>,
}

/// A route of an interface, as the kernel has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Installed {
    /// Destination.
    pub dst: IpNet,
    /// Table.
    pub table: u32,
}

/// An open socket.
pub struct Netlink(NlSocketHandle);

impl fmt::Debug for Netlink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Netlink").finish_non_exhaustive()
    }
}

impl Netlink {
    /// Opens a socket in the namespace of the calling thread.
    ///
    /// # Errors
    ///
    /// Errors of the system calls.
    pub fn open() -> io::Result<Self> {
        NlSocketHandle::connect(NlFamily::Route, None, Groups::empty()).map(Self).map_err(socket_error)
    }

    /// All interfaces.
    ///
    /// # Errors
    ///
    /// Errors of the kernel.
    pub fn links(&self) -> io::Result<Vec<Link>> {
        let request = IfinfomsgBuilder::default().ifi_family(RtAddrFamily::Unspecified).build().map_err(other)?;
        let answers: Vec<Ifinfomsg> = self.request(Rtm::Getlink, NlmF::DUMP, request)?;
        Ok(answers.iter().filter_map(link).collect())
    }

    /// The interface of this name.
    ///
    /// # Errors
    ///
    /// Errors of the kernel.
    pub fn link(&self, name: &str) -> io::Result<Option<Link>> {
        Ok(self.links()?.into_iter().find(|link| link.name == name))
    }

    /// Changes an interface.
    ///
    /// # Errors
    ///
    /// Errors of the kernel: the name is taken, or the address is refused.
    pub fn change(&self, index: u32, change: &Change<'_>) -> io::Result<()> {
        let mut attributes = RtBuffer::new();
        if let Some(name) = change.name {
            attributes.push(attribute(Ifla::Ifname, zero_ended(name))?);
        }
        if let Some(mac) = change.mac {
            attributes.push(attribute(Ifla::Address, mac.0.to_vec())?);
        }
        if let Some(netns) = change.netns {
            attributes.push(attribute(Ifla::NetNsFd, netns.as_raw_fd().to_ne_bytes().to_vec())?);
        }
        self.set_link(index, change.up, attributes)
    }

    /// Gives an interface further names.
    ///
    /// # Errors
    ///
    /// Errors of the kernel: an interface of the namespace has one of them.
    pub fn add_altnames(&self, index: u32, names: &[String]) -> io::Result<()> {
        self.change_properties(NEW_PROPERTIES, index, names)
    }

    /// Removes further names of an interface.
    ///
    /// # Errors
    ///
    /// Errors of the kernel: it does not have one of them.
    pub fn remove_altnames(&self, index: u32, names: &[String]) -> io::Result<()> {
        self.change_properties(DELETE_PROPERTIES, index, names)
    }

    fn change_properties(&self, kind: u16, index: u32, names: &[String]) -> io::Result<()> {
        if names.is_empty() {
            return Ok(());
        }
        let mut list = Vec::new();
        for name in names {
            let name = zero_ended(name);
            // Length and type, then the value, padded to 4 bytes (`netlink(7)`).
            let len = u16::try_from(4 + name.len()).map_err(io::Error::other)?;
            list.extend(len.to_ne_bytes());
            list.extend(ALTNAME.to_ne_bytes());
            list.extend(&name);
            list.resize(list.len().next_multiple_of(4), 0);
        }
        let list = attribute(Ifla::from(PROPERTIES | NESTED), list)?;
        self.change_link(kind.into(), index, false, RtBuffer::from_iter([list]))
    }

    /// Sets the alias of an interface.
    ///
    /// # Errors
    ///
    /// Errors of the kernel.
    pub fn set_alias(&self, index: u32, alias: &str) -> io::Result<()> {
        self.set_link(index, false, RtBuffer::from_iter([attribute(Ifla::Ifalias, zero_ended(alias))?]))
    }

    fn set_link(&self, index: u32, up: bool, attributes: RtBuffer<Ifla, Buffer>) -> io::Result<()> {
        self.change_link(Rtm::Setlink, index, up, attributes)
    }

    fn change_link(&self, kind: Rtm, index: u32, up: bool, attributes: RtBuffer<Ifla, Buffer>) -> io::Result<()> {
        let index = index.try_into().map_err(io::Error::other)?;
        let builder = IfinfomsgBuilder::default().ifi_family(RtAddrFamily::Unspecified).ifi_index(index);
        let builder = if up { builder.up() } else { builder };
        let request = builder.ifi_type(Arphrd::from(0)).rtattrs(attributes).build().map_err(other)?;
        self.request::<_, Ifinfomsg>(kind, NlmF::ACK, request).map(|_| ())
    }

    /// The addresses of an interface.
    ///
    /// # Errors
    ///
    /// Errors of the kernel.
    pub fn addresses(&self, index: u32) -> io::Result<Vec<IpNet>> {
        let request = IfaddrmsgBuilder::default()
            .ifa_family(RtAddrFamily::Unspecified)
            .ifa_prefixlen(0)
            .ifa_scope(RtScope::Universe)
            .ifa_index(0)
            .build()
            .map_err(other)?;
        let answers: Vec<Ifaddrmsg> = self.request(Rtm::Getaddr, NlmF::DUMP, request)?;
        let of_link = answers.iter().filter(|answer| *answer.ifa_index() == index);
        let address = |answer: &Ifaddrmsg| {
            let find = |kind| find(answer.rtattrs().iter(), |of: &Ifa| *of == kind);
            let bytes = find(Ifa::Local).or_else(|| find(Ifa::Address))?;
            Some(IpNet { address: from_octets(bytes)?, prefix: *answer.ifa_prefixlen() })
        };
        Ok(of_link.filter_map(address).collect())
    }

    /// Adds an address. One of IPv6 is used at once, without a test for duplicates (`RFC 4862 §5.4`): IPAM gives each
    /// once.
    ///
    /// # Errors
    ///
    /// Errors of the kernel: the interface has the address, or IPv6 is disabled.
    pub fn add_address(&self, index: u32, net: IpNet) -> io::Result<()> {
        let bytes = octets(net.address);
        let mut attributes = RtBuffer::new();
        attributes.push(attribute(Ifa::Local, bytes.clone())?);
        attributes.push(attribute(Ifa::Address, bytes)?);
        let request = IfaddrmsgBuilder::default()
            .ifa_family(family(net))
            .ifa_prefixlen(net.prefix)
            .ifa_flags(if net.address.is_ipv6() { IfaF::NODAD } else { IfaF::empty() })
            .ifa_scope(RtScope::Universe)
            .ifa_index(index)
            .rtattrs(attributes)
            .build()
            .map_err(other)?;
        let flags = NlmF::ACK | NlmF::CREATE | NlmF::EXCL;
        self.request::<_, Ifaddrmsg>(Rtm::Newaddr, flags, request).map(|_| ())
    }

    /// The routes over an interface.
    ///
    /// # Errors
    ///
    /// Errors of the kernel.
    pub fn routes(&self, index: u32) -> io::Result<Vec<Installed>> {
        let mut all = Vec::new();
        for family in [RtAddrFamily::Inet, RtAddrFamily::Inet6] {
            let request = route_builder(family).build().map_err(other)?;
            let answers: Vec<Rtmsg> = self.request(Rtm::Getroute, NlmF::DUMP, request)?;
            all.extend(answers.iter().filter_map(|answer| installed(answer, index)));
        }
        Ok(all)
    }

    /// Adds a route.
    ///
    /// # Errors
    ///
    /// Errors of the kernel: there is such a route, or the next hop cannot be reached.
    pub fn add_route(&self, index: u32, route: &Route, gateway: Option<std::net::IpAddr>) -> io::Result<()> {
        let dst = route.dst.network();
        let mut attributes = RtBuffer::new();
        attributes.push(attribute(Rta::Oif, index.to_ne_bytes().to_vec())?);
        attributes.push(attribute(Rta::Dst, octets(dst.address))?);
        if let Some(gateway) = gateway {
            attributes.push(attribute(Rta::Gateway, octets(gateway))?);
        }
        if let Some(priority) = route.priority {
            attributes.push(attribute(Rta::Priority, priority.to_ne_bytes().to_vec())?);
        }
        if let Some(table) = route.table {
            attributes.push(attribute(Rta::Table, table.to_ne_bytes().to_vec())?);
        }
        let metrics = metrics(&[(METRIC_MTU, route.mtu), (METRIC_ADVMSS, route.advmss)]);
        if !metrics.is_empty() {
            attributes.push(attribute(Rta::Metrics, metrics)?);
        }
        let scope = match route.scope {
            Some(scope) => RtScope::from(scope),
            None if gateway.is_none() && dst.address.is_ipv4() => RtScope::Link,
            None => RtScope::Universe,
        };
        let request = route_builder(family(dst))
            .rtm_dst_len(dst.prefix)
            .rtm_table(RtTable::Main)
            .rtm_protocol(Rtprot::Boot)
            .rtm_scope(scope)
            .rtm_type(Rtn::Unicast)
            .rtattrs(attributes)
            .build()
            .map_err(other)?;
        self.request::<_, Rtmsg>(Rtm::Newroute, NlmF::ACK | NlmF::CREATE | NlmF::EXCL, request).map(|_| ())
    }

    /// Sends a request, and collects its answers.
    fn request<P, R>(&self, kind: Rtm, flags: NlmF, payload: P) -> io::Result<Vec<R>>
    where
        P: Size + ToBytes + fmt::Debug,
        R: Size + FromBytesWithInput<Input = usize> + fmt::Debug + Clone,
    {
        let message = NlmsghdrBuilder::default()
            .nl_type(kind)
            .nl_flags(NlmF::REQUEST | flags)
            .nl_payload(NlPayload::Payload(payload))
            .build()
            .map_err(other)?;
        self.0.send(&message).map_err(socket_error)?;
        let mut answers = Vec::new();
        loop {
            let (messages, _) = self.0.recv::<u16, R>().map_err(socket_error)?;
            for message in messages {
                let message: Nlmsghdr<u16, R> = message.map_err(socket_error)?;
                match message.nl_payload() {
                    NlPayload::Err(error) => return Err(io::Error::from_raw_os_error(-error.error())),
                    NlPayload::Ack(_) | NlPayload::Empty | NlPayload::DumpExtAck(_) => return Ok(answers),
                    NlPayload::Payload(answer) => answers.push(answer.clone()),
                }
            }
        }
    }
}

fn other(error: impl std::error::Error + Send + Sync + 'static) -> io::Error {
    io::Error::other(error)
}

fn socket_error(error: SocketError) -> io::Error {
    match error {
        SocketError::Io(error) => {
            error.raw_os_error().map_or_else(|| io::Error::other(error.to_string()), io::Error::from_raw_os_error)
        }
        other => io::Error::other(other),
    }
}

fn attribute<T: RtaType + Size>(kind: T, bytes: Vec<u8>) -> io::Result<Rtattr<T, Buffer>> {
    RtattrBuilder::default().rta_type(kind).rta_payload(Buffer::from(bytes)).build().map_err(other)
}

fn zero_ended(text: &str) -> Vec<u8> {
    let mut bytes = text.as_bytes().to_vec();
    bytes.push(0);
    bytes
}

fn family(net: IpNet) -> RtAddrFamily {
    if net.address.is_ipv4() { RtAddrFamily::Inet } else { RtAddrFamily::Inet6 }
}

fn route_builder(family: RtAddrFamily) -> RtmsgBuilder {
    RtmsgBuilder::default()
        .rtm_family(family)
        .rtm_dst_len(0)
        .rtm_src_len(0)
        .rtm_tos(0)
        .rtm_table(RtTable::Unspec)
        .rtm_protocol(Rtprot::Unspec)
        .rtm_scope(RtScope::Universe)
        .rtm_type(Rtn::Unspec)
}

/// Metrics as attributes (`struct rtattr`: length and type, then the value).
fn metrics(values: &[(u16, Option<u32>)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (kind, value) in values {
        if let Some(value) = value {
            bytes.extend(8_u16.to_ne_bytes());
            bytes.extend(kind.to_ne_bytes());
            bytes.extend(value.to_ne_bytes());
        }
    }
    bytes
}

/// The bytes of the first attribute for which `is` is true.
fn find<'a, T: RtaType + 'a>(
    mut attributes: impl Iterator<Item = &'a Rtattr<T, Buffer>>,
    is: impl Fn(&T) -> bool,
) -> Option<&'a [u8]> {
    Some(attributes.find(|attribute| is(attribute.rta_type()))?.rta_payload().as_ref())
}

fn number(bytes: Option<&[u8]>) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes?.try_into().ok()?))
}

fn text(bytes: &[u8]) -> Option<String> {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8(bytes.get(..end)?.to_vec()).ok()
}

fn link(answer: &Ifinfomsg) -> Option<Link> {
    let of = |kind: Ifla| find(answer.rtattrs().iter(), |of: &Ifla| *of == kind);
    let of_number = |kind: u16| find(answer.rtattrs().iter(), |of: &Ifla| u16::from(*of) & TYPE_MASK == kind);
    Some(Link {
        index: u32::try_from(*answer.ifi_index()).ok()?,
        name: text(of(Ifla::Ifname)?)?,
        up: answer.ifi_flags().contains(Iff::UP),
        mac: of(Ifla::Address).and_then(|bytes| bytes.try_into().ok()).map(MacAddress),
        mtu: number(of(Ifla::Mtu)).unwrap_or_default(),
        parent: of_number(PARENT).and_then(text),
        alias: of(Ifla::Ifalias).and_then(text),
        altnames: of_number(PROPERTIES).map(altnames).unwrap_or_default(),
    })
}

/// The names in a list of properties.
fn altnames(mut list: &[u8]) -> Vec<String> {
    let mut names = Vec::new();
    while let Some(&[len0, len1, kind0, kind1]) = list.first_chunk() {
        let len = usize::from(u16::from_ne_bytes([len0, len1]));
        let Some(value) = list.get(4..len) else { break };
        if u16::from_ne_bytes([kind0, kind1]) & TYPE_MASK == ALTNAME {
            names.extend(text(value));
        }
        list = list.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    names
}

fn installed(answer: &Rtmsg, index: u32) -> Option<Installed> {
    let of = |kind: Rta| find(answer.rtattrs().iter(), |of: &Rta| *of == kind);
    (number(of(Rta::Oif))? == index).then_some(())?;
    let is_v4 = *answer.rtm_family() == RtAddrFamily::Inet;
    let unspecified: &[u8] = if is_v4 { &[0; 4] } else { &[0; 16] };
    let dst = IpNet { address: from_octets(of(Rta::Dst).unwrap_or(unspecified))?, prefix: *answer.rtm_dst_len() };
    let of_header = u32::from(u8::from(*answer.rtm_table()));
    Some(Installed { dst, table: number(of(Rta::Table)).unwrap_or(of_header) })
}
