//! Pools and the switch, from the PF's registers.

mod common;

use common::{MAC, PF, effects, nic, write};
use x550::{Destination, Mac, Mirror, Nic, Pool, PortVlan, Tag};

const UPE: u32 = 1 << 22;
const VPE: u32 = 1 << 23;
const AUPE: u32 = 1 << 24;
const ROMPE: u32 = 1 << 25;
const ROPE: u32 = 1 << 26;
const BAM: u32 = 1 << 27;
const MPE: u32 = 1 << 28;

const UNICAST: Mac = Mac([2, 0, 0, 0, 0x34, 0x56]);
const GROUP: Mac = Mac([1, 0, 0x5e, 0, 0x34, 0x56]);

/// Pool 2 receives and sends, is a member of VLAN 7, and the NIC's filters pass all that a pool may have.
fn ready() -> Nic {
    let mut nic = nic();
    for (offset, value) in [
        (0x51e0, 1 << 2),
        (0x8110, 1 << 2),
        (0x5080, 1 << 9 | 1 << 10),
        (0x5090, 4),
        (0xf100 + 4 * 9, 1 << 31 | 7),
        (0xf200 + 8 * 9, 1 << 2),
        (0xf100 + 4 * 10, 1 << 31 | 8),
        (0xf200 + 8 * 10, 1 << 3),
    ] {
        write(&mut nic, PF, offset, value);
    }
    nic
}

fn with(offload: u32) -> Pool {
    let mut nic = ready();
    write(&mut nic, PF, 0xf008, offload);
    nic.pool(2)
}

/// X16: filters.
/// Each bit of VMOLR x destination x tag. Rows: bits, and the destinations that they let in.
#[test]
fn each_offload_bit_lets_in_its_frames() {
    use Destination::{Broadcast, HashedGroup, HashedUnicast, OtherGroup, OtherUnicast, Own};
    let destinations = [Own, HashedUnicast, OtherUnicast, HashedGroup, OtherGroup, Broadcast];
    let (untagged, member, other): (Tag, Tag, Tag) = (None, Some(7), Some(8));
    for (bits, let_in) in [
        (0, &[Own][..]),
        (ROPE, &[Own, HashedUnicast]),
        (UPE, &[Own, HashedUnicast, OtherUnicast]),
        (ROMPE, &[Own, HashedGroup]),
        (MPE, &[Own, HashedGroup, OtherGroup]),
        (BAM, &[Own, Broadcast]),
        (UPE | MPE | BAM, &destinations),
    ] {
        for (more, tags) in [
            (0, &[member][..]),
            (AUPE, &[untagged, member]),
            (VPE, &[member, other]),
            (AUPE | VPE, &[untagged, member, other]),
        ] {
            let pool = with(bits | more);
            for destination in destinations {
                for tag in [untagged, member, other] {
                    let expected = let_in.contains(&destination) && tags.contains(&tag);
                    let what = format!("VMOLR {:#x}: {destination:?} {tag:?}", bits | more);
                    assert_eq!(pool.accepts(destination, tag), expected, "{what}");
                }
            }
        }
    }
}

/// X16: filters.
#[test]
fn filters_of_the_nic_limit_those_of_a_pool() {
    let all = UPE | VPE | AUPE | ROMPE | ROPE | BAM | MPE;
    let after = |offset, value| {
        let mut nic = ready();
        write(&mut nic, PF, 0xf008, all);
        write(&mut nic, PF, offset, value);
        nic.pool(2)
    };
    let pool = with(all);
    assert!(pool.all_unicast && pool.broadcast && pool.hashed_groups && pool.receives && pool.sends);
    assert!(!after(0x5080, 1 << 10).all_unicast, "FCTRL.UPE");
    assert!(!after(0x5080, 1 << 9).broadcast, "FCTRL.BAM");
    assert!(!after(0x5090, 0).hashed_groups, "MCSTCTRL.MFE");
    assert!(!after(0x51e0, 0).receives && !after(0x51e0, 0).accepts(Destination::Own, None), "VFRE");
    assert!(!after(0x8110, 0).sends, "VFTE");
    let filtered = after(0x5088, 1 << 30);
    assert!(!filtered.has_vlan(7) && filtered.accepts(Destination::Own, None), "VLNCTRL.VFE, an empty VFTA");
}

/// X29: loopback.
#[test]
fn the_mac_loops_back_only_without_pools() {
    let mut nic = ready();
    write(&mut nic, PF, 0x4240, 1 << 15);
    assert!(!nic.switching().loops_back);
    assert!(effects(&mut nic, PF, 0x51b0, 0).pools && nic.switching().loops_back);
    assert!(effects(&mut nic, PF, 0x4240, 0).pools && !nic.switching().loops_back);
}

/// X16: filters.
#[test]
fn vlans_are_the_entries_of_the_pool_that_pass_the_filter() {
    let mut nic = ready();
    assert_eq!((0..4096).filter(|vlan| nic.pool(2).has_vlan(*vlan)).collect::<Vec<_>>(), [7]);
    assert_eq!((0..=u16::MAX).filter(|vlan| nic.pool(3).has_vlan(*vlan)).collect::<Vec<_>>(), [8]);
    write(&mut nic, PF, 0x5088, 1 << 30);
    assert!(!nic.pool(2).has_vlan(7));
    write(&mut nic, PF, 0xa000, 1 << 7);
    assert!(nic.pool(2).has_vlan(7) && !nic.pool(3).has_vlan(8));
    write(&mut nic, PF, 0xf100 + 4 * 9, 7);
    assert!(!nic.pool(2).has_vlan(7), "not valid");
    write(&mut nic, PF, 0xf100 + 4 * 63, 1 << 31 | 4095);
    write(&mut nic, PF, 0xf200 + 8 * 63 + 4, 1 << 31);
    write(&mut nic, PF, 0xa000 + 4 * 127, 1 << 31);
    write(&mut nic, PF, 0x11050, 3);
    assert!(nic.pool(63).has_vlan(4095), "the last entry, VLAN and pool");
}

/// X16: filters.
#[test]
fn a_pool_has_the_valid_addresses_that_select_it() {
    let mut nic = ready();
    write(&mut nic, PF, 0xa600, 1 << 2);
    assert_eq!(nic.pool(2).addresses, [MAC]);
    for (n, high, pools) in [(1, 1 << 31 | 0x5634, 1 << 2), (2, 0x5634, 1 << 2), (127, 1 << 31 | 0x5634, 1 << 3)] {
        write(&mut nic, PF, 0xa200 + 8 * n, 2);
        write(&mut nic, PF, 0xa204 + 8 * n, high);
        write(&mut nic, PF, 0xa600 + 8 * n, pools);
    }
    assert_eq!(nic.pool(2).addresses, [MAC, UNICAST]);
    assert_eq!((nic.pool(3).addresses, nic.pool(4).addresses), (vec![UNICAST], vec![]));
}

#[test]
fn an_address_is_classified_by_tables_and_their_hash() {
    let mut nic = ready();
    let destination = |nic: &Nic, address| nic.destination(&nic.pool(2), address);
    assert_eq!(destination(&nic, Mac::BROADCAST), Destination::Broadcast);
    assert_eq!(destination(&nic, UNICAST), Destination::OtherUnicast);
    assert_eq!(destination(&nic, GROUP), Destination::OtherGroup);
    // The hash is 563h for offset 0: bit 3 of register 2Bh.
    write(&mut nic, PF, 0x5200 + 4 * 0x2b, 1 << 3);
    assert_eq!(destination(&nic, GROUP), Destination::HashedGroup);
    assert_eq!(destination(&nic, UNICAST), Destination::OtherUnicast, "MTA is for groups");
    write(&mut nic, PF, 0xf400 + 4 * 0x2b, 1 << 3);
    assert_eq!(destination(&nic, UNICAST), Destination::HashedUnicast);
    write(&mut nic, PF, 0x5090, 4 | 3);
    assert_eq!(destination(&nic, GROUP), Destination::OtherGroup, "another offset of the hash");
    write(&mut nic, PF, 0xa600, 1 << 2);
    assert_eq!(destination(&nic, MAC), Destination::Own);
}

/// X18: VMVIR and QDE.
#[test]
fn a_port_vlan_is_one_that_is_always_inserted() {
    for (register, expected) in [
        (0x4000_e007, Some(PortVlan { vlan: 7, priority: 7 })),
        (0x4000_0fff, Some(PortVlan { vlan: 4095, priority: 0 })),
        (0x4000_0000, Some(PortVlan { vlan: 0, priority: 0 })),
        (0x0000_e007, None),
        (0x8000_e007, None),
        (0xc000_e007, None),
    ] {
        let mut nic = ready();
        write(&mut nic, PF, 0x8008, register);
        assert_eq!(nic.pool(2).port_vlan, expected, "{register:#x}");
    }
}

/// X18: VMVIR and QDE.
#[test]
fn hiding_the_vlan_is_a_bit_of_the_pools_queues() {
    let mut nic = ready();
    write(&mut nic, PF, 0x2f04, 8 << 8 | 2);
    assert!(!nic.pool(2).hides_vlan, "not a write");
    write(&mut nic, PF, 0x2f04, 1 << 16 | 8 << 8 | 1);
    assert!(!nic.pool(2).hides_vlan, "the drop bit alone");
    write(&mut nic, PF, 0x2f04, 1 << 16 | 8 << 8 | 3);
    assert!(nic.pool(2).hides_vlan && !nic.pool(1).hides_vlan);
}

/// X17: spoof checks.
#[test]
fn spoof_checks_are_three_bits_of_each_pool() {
    for (bit, checks) in [(2, [true, false, false]), (10, [false, true, false]), (18, [false, false, true])] {
        let mut nic = ready();
        write(&mut nic, PF, 0x8200, 1 << bit);
        let of = |pool: Pool| [pool.checks_mac, pool.checks_vlan, pool.checks_type];
        assert_eq!((of(nic.pool(2)), of(nic.pool(3))), (checks, [false; 3]));
    }
}

/// X19: rates.
#[test]
fn a_rate_is_a_fraction_of_the_links_speed() {
    let limited = |register: u32, queues: std::ops::Range<u32>| {
        let mut nic = ready();
        for queue in queues {
            write(&mut nic, PF, 0x4904, queue);
            write(&mut nic, PF, 0x4984, register);
        }
        nic.pool(2).rate
    };
    for (register, rate) in [
        (0x8005_0000, Some(500)),
        (0x8000_4000, Some(10_000)),
        (0x80ff_ffff, Some(9)),
        (0x8000_0001, Some(163_840_000)),
        (0x8000_0000, None),
        (0x0005_0000, None),
    ] {
        assert_eq!(limited(register, 8..12), rate, "{register:#x}");
    }
    assert_eq!(limited(0x8005_0000, 8..11), None, "a queue without a limit");
}

/// X15: queues of a pool.
#[test]
fn the_pools_share_the_queues_evenly() {
    for (mode, pools, queues) in [(1, 16, 8), (2, 32, 4), (3, 64, 2)] {
        let mut nic = ready();
        write(&mut nic, PF, 0x11050, mode);
        assert_eq!(nic.switching().pools, pools);
        let all: Vec<u16> = (0..pools).flat_map(|pool| nic.pool(pool).queues).collect();
        assert_eq!((all, nic.pool(1).queues.len()), ((0..128).collect(), queues));
        write(&mut nic, PF, 0x51e4, u32::MAX);
        assert_eq!(nic.pool(63).receives, pools == 64, "no pool without queues");
    }
}

#[test]
fn without_virtualization_the_nic_is_one_pool() {
    let mut nic = Nic::new(MAC);
    write(&mut nic, PF, 0x5080, 1 << 8 | 1 << 10);
    let (pool, other) = (nic.pool(0), nic.pool(1));
    assert_eq!((pool.queues.clone(), pool.addresses.as_slice()), (0..128, [MAC].as_slice()));
    assert!(pool.receives && pool.sends && pool.broadcast && pool.all_groups && pool.untagged && !pool.all_unicast);
    assert!(pool.has_vlan(0) && pool.has_vlan(4095), "VLNCTRL.VFE is off");
    assert!(!other.receives && !other.sends);
    write(&mut nic, PF, 0x5088, 1 << 30);
    write(&mut nic, PF, 0xa004, 1);
    assert!(nic.pool(0).has_vlan(32) && !nic.pool(0).has_vlan(33));
    let switching = nic.switching();
    assert_eq!((switching.pools, switching.is_veb, switching.default_pool), (1, false, Some(0)));
}

/// X20: switch.
#[test]
fn the_switch_has_a_mode_a_default_and_replication() {
    let mut nic = ready();
    assert!(!nic.switching().is_veb && !nic.switching().replicates, "VEPA");
    write(&mut nic, PF, 0x8220, 1);
    write(&mut nic, PF, 0x51b0, 1 | 5 << 7 | 1 << 30);
    let switching = nic.switching();
    assert!(switching.is_veb && switching.replicates && switching.all_unicast && !switching.all_groups);
    assert_eq!((switching.default_pool, switching.pools), (Some(5), 32));
    write(&mut nic, PF, 0x51b0, 1 | 5 << 7 | 1 << 29);
    assert_eq!((nic.switching().default_pool, nic.switching().pf_pool), (None, 5));
    write(&mut nic, PF, 0x5180, 1 << 2);
    assert!(nic.pool(2).reflects && !nic.pool(3).reflects);
}

/// X20: switch.
#[test]
fn each_mirror_rule_copies_what_its_bits_select() {
    let none = Mirror { to: 5, pools: 0, vlans: Vec::new(), from_uplink: false, to_uplink: false };
    for (bits, expected) in [
        (0, None),
        (1, Some(Mirror { pools: 1 << 40 | 2, ..none.clone() })),
        (2, Some(Mirror { from_uplink: true, ..none.clone() })),
        (4, Some(Mirror { to_uplink: true, ..none.clone() })),
        (8, Some(Mirror { vlans: vec![7], ..none.clone() })),
    ] {
        let mut nic = ready();
        for (offset, value) in [
            (0xf600 + 4 * 3, 5 << 8 | bits),
            (0xf630 + 4 * 3, 2),
            (0xf630 + 4 * 7, 1 << 8),
            (0xf610 + 4 * 3, 1 << 9 | 1 << 11),
        ] {
            write(&mut nic, PF, offset, value);
        }
        assert_eq!(nic.switching().mirrors, expected.into_iter().collect::<Vec<_>>(), "{bits}");
    }
}

#[test]
fn queues_are_plain_values_of_their_registers() {
    let mut nic = ready();
    for (offset, value) in [
        (0xd000, 0x1_2380),
        (0xd004, 1),
        (0xd008, 0x100),
        (0xd014, 1 << 28 | 2),
        (0xd018, 9),
        (0xd028, 1 << 30 | 1 << 25 | 1 << 15 | 1518),
        (0x7000, 0x80),
        (0x7008, 0x80),
        (0x7018, 3),
        (0x7028, 1 << 25),
        (0x7038, 0x1001),
    ] {
        write(&mut nic, PF, offset, value);
    }
    let (receive, transmit) = (nic.receive_queue(64), nic.transmit_queue(64));
    assert!(!receive.enabled && !transmit.enabled, "RXCTRL and DMATXCTL");
    assert_eq!((receive.base, receive.len, receive.buffer, receive.longest), (0x1_0001_2380, 256, 2048, Some(1518)));
    assert!(receive.drops && receive.strips_vlan);
    assert_eq!((receive.available(), transmit.available(), transmit.head_write_back), (9, 3, Some(0x1000)));
    write(&mut nic, PF, 0x3000, 1);
    write(&mut nic, PF, 0x4a80, 1);
    nic.set_head(x550::Direction::Receive, 64, 5);
    nic.set_head(x550::Direction::Transmit, 64, 2);
    assert!(nic.receive_queue(64).enabled && nic.transmit_queue(64).enabled);
    assert_eq!((nic.receive_queue(64).available(), nic.transmit_queue(64).available()), (4, 1));
    assert_eq!(nic.receive_queue(u16::MAX), nic.receive_queue(127));
}
