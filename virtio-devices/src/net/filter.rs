//! The receive filter: the frames that the driver accepts (`virtio 1.4 §5.1.6.5.1` to §5.1.6.5.3). No I/O, no locks.

pub(crate) use crate::frames::net_protocol::ethernet::{ETHERNET_HEADER, Mac, is_multicast};
use crate::frames::policy::{self, Policy, Tags, VlanProtocol};

/// The most addresses of one kind that are kept of a virtio driver. If it sets more, it receives all frames of that
/// kind, as from hardware with a full table.
pub(crate) const MAX_ADDRESSES: usize = 64;

/// The bytes at the beginning of a frame that decide: two addresses, tags and a type. A shorter frame has zeros there.
pub(crate) const HEAD: usize = policy::HEAD;

const BROADCAST: Mac = [0xff; 6];
const VLAN_IDS: usize = 4096;

fn destination(head: &[u8; HEAD]) -> Mac {
    let [a, b, c, d, e, f, ..] = *head;
    [a, b, c, d, e, f]
}

/// A bounded set of addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Addresses {
    table: Vec<Mac>,
    room: usize,
    overflow: bool,
}

impl Addresses {
    /// An empty set of at most [`MAX_ADDRESSES`].
    pub(crate) fn new() -> Self {
        Self::with_room(MAX_ADDRESSES)
    }

    /// An empty set of at most `room` addresses.
    pub(crate) const fn with_room(room: usize) -> Self {
        Self { table: Vec::new(), room, overflow: false }
    }

    /// Adds `mac`; a full table accepts every address from now on.
    pub(crate) fn add(&mut self, mac: Mac) {
        if self.table.len() < self.room {
            self.table.push(mac);
        } else {
            self.overflow = true;
        }
    }

    /// The addresses.
    pub(crate) fn addresses(&self) -> &[Mac] {
        &self.table
    }

    /// True if more were added than there is room for.
    pub(crate) fn overflow(&self) -> bool {
        self.overflow
    }

    fn wants(&self, mac: &Mac) -> bool {
        self.overflow || self.addresses().contains(mac)
    }
}

/// The receive modes of the control queue's class `VIRTIO_NET_CTRL_RX`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Every frame.
    Promiscuous,
    /// Every multicast frame.
    AllMulticast,
    /// Every unicast frame.
    AllUnicast,
    /// No multicast frame, but broadcast.
    NoMulticast,
    /// No unicast frame.
    NoUnicast,
    /// No broadcast frame.
    NoBroadcast,
}

impl Mode {
    /// All modes, in the order of their commands.
    pub(crate) const ALL: [Self; 6] = [
        Self::Promiscuous,
        Self::AllMulticast,
        Self::AllUnicast,
        Self::NoMulticast,
        Self::NoUnicast,
        Self::NoBroadcast,
    ];
}

/// The receive filter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Filter {
    /// The NIC's own address.
    pub mac: Mac,
    /// Further unicast addresses.
    pub unicast: Addresses,
    /// Multicast addresses.
    pub multicast: Addresses,
    modes: [bool; 6],
    vlans: Option<Box<[u64; VLAN_IDS / 64]>>,
}

impl Filter {
    /// The filter after a reset: promiscuous and without a VLAN filter, so that a driver that never sends a command
    /// receives its frames. Linux sets the mode and both tables whenever it opens the interface.
    pub(crate) fn new(mac: Mac) -> Self {
        let mut filter =
            Self { mac, unicast: Addresses::new(), multicast: Addresses::new(), modes: [false; 6], vlans: None };
        filter.set_mode(Mode::Promiscuous, true);
        filter
    }

    /// Switches a mode on or off.
    pub(crate) fn set_mode(&mut self, mode: Mode, on: bool) {
        self.modes[mode as usize] = on;
    }

    /// True if a mode is on.
    pub(crate) fn mode(&self, mode: Mode) -> bool {
        self.modes[mode as usize]
    }

    /// Filters by VLAN from now on, with no VLAN accepted yet: `VIRTIO_NET_F_CTRL_VLAN` was negotiated.
    pub(crate) fn enable_vlans(&mut self) {
        self.vlans.get_or_insert_with(|| Box::new([0; VLAN_IDS / 64]));
    }

    /// Adds or removes VLAN `id`. Returns true if there is such a VLAN and a VLAN filter.
    pub(crate) fn set_vlan(&mut self, id: u16, wanted: bool) -> bool {
        let Some(word) = self.vlans.as_mut().and_then(|vlans| vlans.get_mut(usize::from(id) / 64)) else {
            return false;
        };
        let bit = 1 << (id % 64);
        *word = if wanted { *word | bit } else { *word & !bit };
        true
    }

    /// The accepted VLANs, in ascending order; `None` without a VLAN filter.
    pub(crate) fn vlans(&self) -> Option<Vec<u16>> {
        let vlans = self.vlans.as_ref()?;
        Some((0..VLAN_IDS as u16).filter(|id| vlans[usize::from(*id) / 64] & (1 << (id % 64)) != 0).collect())
    }

    /// True if every frame is accepted, so that none needs to be checked.
    pub(crate) fn wants_all(&self) -> bool {
        self.mode(Mode::Promiscuous)
    }

    /// True if the frame that begins with `head` is accepted.
    pub(crate) fn wants(&self, head: &[u8; HEAD]) -> bool {
        self.wants_all() || (self.wants_vlan(head) && self.wants_address(head))
    }

    /// True if the frame that begins with `head` is accepted by a driver that the host does not trust: no mode and no
    /// full table brings it frames for others.
    pub(crate) fn wants_untrusted(&self, head: &[u8; HEAD], policy: &Policy) -> bool {
        let mac = destination(head);
        let known = |table: &Addresses| table.addresses().contains(&mac);
        self.wants_vlan(head)
            && if mac == BROADCAST {
                !self.mode(Mode::NoBroadcast)
            } else if is_multicast(&mac) {
                !self.mode(Mode::NoMulticast) && known(&self.multicast)
            } else {
                let own = policy.fixed_address().unwrap_or(self.mac);
                let further = policy.counts_further(self.unicast.addresses().len()) && known(&self.unicast);
                !self.mode(Mode::NoUnicast) && (mac == own || further)
            }
    }

    fn wants_vlan(&self, head: &[u8; HEAD]) -> bool {
        let Some(vlans) = &self.vlans else { return true };
        match Tags::of(head).vlan {
            Some((VlanProtocol::Customer, id)) => {
                vlans.get(usize::from(id) / 64).is_some_and(|word| word & (1 << (id % 64)) != 0)
            }
            // A driver's command for a VLAN has no type, and Linux sends none for a provider's, whose frames it accepts
            // without a command.
            Some((VlanProtocol::Service, _)) | None => true,
        }
    }

    fn wants_address(&self, head: &[u8; HEAD]) -> bool {
        let mac = &destination(head);
        if *mac == BROADCAST {
            !self.mode(Mode::NoBroadcast)
        } else if is_multicast(mac) {
            !self.mode(Mode::NoMulticast) && (self.mode(Mode::AllMulticast) || self.multicast.wants(mac))
        } else {
            !self.mode(Mode::NoUnicast) && (self.mode(Mode::AllUnicast) || *mac == self.mac || self.unicast.wants(mac))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: Mac = [0x52, 0x54, 0, 0, 0, 1];
    const OTHER: Mac = [0x52, 0x54, 0, 0, 0, 2];
    const GROUP: Mac = [0x01, 0, 0x5e, 0, 0, 1];

    fn head(mac: Mac, rest: [u8; 4]) -> [u8; HEAD] {
        let mut head = [0; HEAD];
        head[..6].copy_from_slice(&mac);
        head[12..16].copy_from_slice(&rest);
        head
    }

    fn wants(filter: &Filter, mac: Mac) -> bool {
        filter.wants(&head(mac, [8, 0, 0, 0]))
    }

    fn strict() -> Filter {
        let mut filter = Filter::new(OWN);
        filter.set_mode(Mode::Promiscuous, false);
        filter
    }

    #[test]
    fn after_a_reset_every_frame_is_wanted() {
        let mut filter = Filter::new(OWN);
        filter.enable_vlans();
        assert!(filter.wants_all() && wants(&filter, OTHER) && wants(&filter, GROUP));
        assert!(filter.wants(&head(OTHER, [0x81, 0, 0, 5])));
    }

    #[test]
    fn strict_filter_accepts_only_own_unicast_and_broadcast() {
        let filter = strict();
        assert_eq!([OWN, OTHER, GROUP, BROADCAST].map(|mac| wants(&filter, mac)), [true, false, false, true]);
    }

    #[test]
    fn each_mode_changes_its_own_kind_of_frame() {
        for (mode, expected) in [
            (Mode::Promiscuous, [true, true, true, true]),
            (Mode::AllMulticast, [true, false, true, true]),
            (Mode::AllUnicast, [true, true, false, true]),
            (Mode::NoMulticast, [true, false, false, true]),
            (Mode::NoUnicast, [false, false, false, true]),
            (Mode::NoBroadcast, [true, false, false, false]),
        ] {
            let mut filter = strict();
            filter.set_mode(mode, true);
            assert_eq!([OWN, OTHER, GROUP, BROADCAST].map(|mac| wants(&filter, mac)), expected, "{mode:?}");
            filter.set_mode(mode, false);
            assert_eq!(filter, strict(), "{mode:?}");
        }
    }

    #[test]
    fn no_multicast_goes_before_all_multicast_and_the_table() {
        let mut filter = strict();
        filter.multicast.add(GROUP);
        assert!(wants(&filter, GROUP));
        filter.set_mode(Mode::AllMulticast, true);
        filter.set_mode(Mode::NoMulticast, true);
        assert!(!wants(&filter, GROUP));
    }

    #[test]
    fn a_full_table_wants_every_address_of_its_kind_and_no_other() {
        let mut filter = strict();
        for last in 0..MAX_ADDRESSES as u8 {
            filter.unicast.add([2, 0, 0, 0, 1, last]);
        }
        assert!(wants(&filter, [2, 0, 0, 0, 1, 63]) && !wants(&filter, OTHER));
        filter.unicast.add([2, 0, 0, 0, 1, 64]);
        assert!(wants(&filter, OTHER) && !wants(&filter, GROUP));
    }

    #[test]
    fn untrusted_driver_cannot_open_its_filter_by_mode_or_overflow() {
        let untrusted = |address| Policy { address, trusted: false, ..Policy::default() };
        let wants_as = |filter: &Filter, address| {
            let policy = untrusted(address);
            [OWN, OTHER, GROUP, BROADCAST].map(|mac| filter.wants_untrusted(&head(mac, [8, 0, 0, 0]), &policy))
        };
        let wants = |filter: &Filter| wants_as(filter, None);
        let mut filter = Filter::new(OWN);
        for mode in [Mode::Promiscuous, Mode::AllMulticast, Mode::AllUnicast] {
            filter.set_mode(mode, true);
            assert_eq!(wants(&filter), [true, false, false, true], "{mode:?}");
        }
        filter.multicast.add(GROUP);
        filter.unicast.add(OTHER);
        assert_eq!(wants(&filter), [true; 4]);
        assert_eq!(
            wants_as(&filter, Some(OWN)),
            [true, false, true, true],
            "it has the address that it was given alone"
        );
        (0..16).for_each(|last| filter.unicast.add([2, 0, 0, 0, 1, last]));
        assert_eq!(wants(&filter), [true, false, true, true], "more than 16 count as none");
        (0..64).for_each(|last| filter.multicast.add([3, 0, 0, 0, 1, last]));
        assert_eq!(wants(&filter), [true, false, true, true]);
        assert!(!filter.wants_untrusted(&head([3, 0, 0, 0, 1, 63], [8, 0, 0, 0]), &untrusted(None)), "it did not fit");
    }

    #[test]
    fn a_tagged_frame_needs_its_vlan_and_an_untagged_one_none() {
        let mut filter = strict();
        let tagged = |id: u8| head(OWN, [0x81, 0, 0x60, id]);
        assert!(filter.wants(&tagged(5)), "no VLAN filter yet");
        assert!(!filter.set_vlan(5, true), "no VLAN filter yet");
        filter.enable_vlans();
        assert!(!filter.wants(&tagged(5)) && wants(&filter, OWN));
        assert!(filter.wants(&tagged(0)), "a priority tag");
        assert!(filter.set_vlan(5, true) && filter.wants(&tagged(5)) && !filter.wants(&tagged(6)));
        assert!(!filter.wants(&head(OTHER, [0x81, 0, 0, 5])), "another's frame in a VLAN of ours");
        assert!(filter.set_vlan(5, false) && !filter.wants(&tagged(5)));
        assert!(filter.wants(&head(OWN, [0x88, 0xa8, 0, 5])), "a service tag, which no driver asks for");
    }

    #[test]
    fn the_vlan_filter_looks_behind_priority_tags() {
        let mut filter = strict();
        filter.enable_vlans();
        assert!(filter.set_vlan(5, true));
        let tagged = |tags: &[[u8; 4]]| {
            let mut head = head(OWN, [0; 4]);
            head[12..12 + 4 * tags.len()].copy_from_slice(&tags.concat());
            filter.wants(&head)
        };
        let (priority, provider) = ([0x81, 0, 0xe0, 0], [0x88, 0xa8, 0, 0]);
        let vlan = |id| [0x81, 0, 0, id];
        assert!(tagged(&[priority, vlan(5)]) && !tagged(&[priority, vlan(6)]));
        assert!(tagged(&[priority, provider, vlan(5)]) && !tagged(&[provider, priority, vlan(6)]));
        assert!(tagged(&[priority, provider, priority]), "in no VLAN");
        assert!(tagged(&[vlan(5), vlan(6)]) && !tagged(&[vlan(6), vlan(5)]), "the first VLAN counts");
    }

    #[test]
    fn a_vlan_beyond_4095_is_refused() {
        let mut filter = strict();
        filter.enable_vlans();
        assert!(filter.set_vlan(4095, true) && !filter.set_vlan(4096, true) && !filter.set_vlan(u16::MAX, false));
    }
}
