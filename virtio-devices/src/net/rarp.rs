//! Frames that announce a NIC's addresses for a driver that does not do it itself, so that bridges and switches find
//! them at a new place: RARP requests (`RFC 903`), which get no answer.

use super::filter::{Filter, Mac};
use crate::frames::net_protocol::header::HEADER;
use crate::frames::policy::{HEAD, Head, Policy};

/// The most frames of a NIC. The first are of its own address.
const MOST: usize = 64;
/// The most candidates, some of which the policy passes: one address in all VLANs, and some more.
const MOST_TRIED: usize = 4096 + MOST;
/// The length of the shortest frame, in bytes.
const SHORTEST: usize = 60;
const ETHERTYPE_RARP: u16 = 0x8035;
const ETHERTYPE_VLAN: u16 = 0x8100;
/// Ethernet, IPv4, the lengths of their addresses, and the operation "request reverse".
const REQUEST: [u8; 8] = [0, 1, 8, 0, 6, 4, 0, 3];

/// Returns one frame for each address and each of its VLANs, each after an empty virtio-net header. The frames have
/// passed the ingress `policy`, so that none is where the driver's own could not be.
pub(crate) fn frames(filter: &Filter, policy: &Policy) -> Vec<Vec<u8>> {
    let vlans = filter.vlans().unwrap_or_default().into_iter().filter(|id| *id != 0);
    let tags: Vec<_> = std::iter::once(None).chain(vlans.map(|id| Some(tag(ETHERTYPE_VLAN, id)))).collect();
    let addresses = std::iter::once(&filter.mac).chain(filter.unicast.addresses());
    let each = addresses.flat_map(|mac| tags.iter().map(|tag| frame(*mac, *tag)));
    let sent = |frame: Vec<u8>| {
        let head = Head::of(&frame).ok()?;
        let new = policy.ingress(&head, filter.mac, |mac| filter.unicast.addresses().contains(mac)).ok()?;
        Some([&[0; HEADER], new.bytes(), frame.get(HEAD..)?].concat())
    };
    each.take(MOST_TRIED).filter_map(sent).take(MOST).collect()
}

/// A tag of this VLAN, without priority.
pub(crate) fn tag(protocol: u16, id: u16) -> [u8; 4] {
    let [a, b] = protocol.to_be_bytes();
    let [c, d] = id.to_be_bytes();
    [a, b, c, d]
}

fn frame(mac: Mac, tag: Option<[u8; 4]>) -> Vec<u8> {
    let nobody = [0; 4];
    let mut frame = vec![0xff; 6];
    frame.extend(mac);
    frame.extend(tag.into_iter().flatten());
    frame.extend(ETHERTYPE_RARP.to_be_bytes());
    frame.extend(REQUEST);
    for part in [&mac[..], &nobody, &mac, &nobody] {
        frame.extend(part);
    }
    frame.resize(SHORTEST, 0);
    frame
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frames::policy::{PortVlan, Trunk, VlanProtocol, VlanSet};

    const MAC: Mac = [0x52, 0x54, 0, 1, 2, 3];

    #[test]
    fn each_address_is_announced_in_each_of_its_vlans() {
        let mut filter = Filter::new(MAC);
        filter.unicast.add([0x52, 0x54, 0, 9, 9, 9]);
        let all = frames(&filter, &Policy::default());
        assert_eq!(all.len(), 2);
        let body = &all[0][HEADER..];
        assert_eq!(
            (&body[..6], &body[6..12], &body[12..14], body.len()),
            (&[0xff; 6][..], &MAC[..], &[0x80, 0x35][..], 60)
        );
        assert_eq!(&body[14..42], [&REQUEST[..], &MAC, &[0; 4], &MAC, &[0; 4]].concat());
        filter.enable_vlans();
        filter.set_vlan(7, true);
        let all = frames(&filter, &Policy::default());
        let tagged: Vec<_> = all.iter().map(|frame| frame[HEADER + 12..HEADER + 16].to_vec()).collect();
        assert_eq!((all.len(), &tagged[1][..]), (4, &[0x81, 0, 0, 7][..]));
    }

    #[test]
    fn an_address_in_a_port_vlan_is_announced_there_alone() {
        let vlan = PortVlan { id: 100, priority: 3, protocol: VlanProtocol::Service };
        let policy = Policy { port_vlan: Some(vlan), ..Policy::default() };
        let all = frames(&Filter::new(MAC), &policy);
        assert_eq!((all.len(), &all[0][HEADER + 12..HEADER + 18]), (1, &[0x88, 0xa8, 0x60, 100, 0x80, 0x35][..]));
        assert_eq!(all[0].len(), HEADER + SHORTEST + 4);
    }

    #[test]
    fn an_address_the_driver_could_not_send_is_not_announced() {
        let mut filter = Filter::new(MAC);
        filter.unicast.add([0x52, 0x54, 0, 9, 9, 9]);
        filter.enable_vlans();
        for id in [7, 8] {
            filter.set_vlan(id, true);
        }
        let trunk = Some(Trunk { vlans: VlanSet::of([8..=9]), protocol: VlanProtocol::Customer });
        let policy = Policy { trunk, spoof_check: true, trusted: false, address: Some(MAC), ..Policy::default() };
        let all = frames(&filter, &policy);
        let heads: Vec<_> = all.iter().map(|frame| &frame[HEADER + 6..HEADER + 16]).collect();
        assert_eq!(heads, [&[&MAC[..], &[0x81, 0, 0, 8]].concat()[..]]);
    }

    #[test]
    fn no_guest_makes_more_frames_than_there_may_be() {
        let mut filter = Filter::new(MAC);
        filter.enable_vlans();
        for id in 0..4095 {
            filter.set_vlan(id, true);
        }
        assert_eq!(frames(&filter, &Policy::default()).len(), MOST);
    }
}
