//! RSS: which queue of a pool gets a frame, for each mode of the NIC.

mod common;

use common::{MAC, PF, effects, nic, stored, write};
use x550::{Model, Nic, Place, Rss, Steered};

const MRQC: u64 = 0x5818;
/// TCP and UDP over IPv4 and IPv6, and both alone.
const FIELDS: u32 = 0xf3 << 16;
const MULTIPLE: u32 = 1 << 13;
/// The key of Microsoft's verification suite.
const KEY: [u32; 10] = [
    0xda56_5a6d,
    0xc20e_5b25,
    0x3d25_6741,
    0xb08f_a343,
    0xcb2b_cad0,
    0xb430_7bae,
    0xa32d_cb77,
    0x0cf2_3080,
    0x3bb7_426a,
    0xfa01_acbe,
];

fn ipv4(protocol: u8, fragment: u8) -> Vec<u8> {
    let mut frame = vec![2; 12];
    frame.extend([8, 0, 0x45, 0, 0, 0, 0, 0, fragment, 0, 64, protocol, 0, 0]);
    frame.extend([66, 9, 149, 187, 161, 142, 100, 80]);
    frame.extend([0x0a, 0xea, 0x06, 0xe6]);
    frame
}

fn ipv6(next: u8) -> Vec<u8> {
    let mut frame = vec![2; 12];
    frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 0, next, 64]);
    frame.extend([0x3f, 0xfe, 0x25, 1, 2, 0, 0x1f, 0xff, 0, 0, 0, 0, 0, 0, 0, 7]);
    frame.extend([0x3f, 0xfe, 0x25, 1, 2, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 1]);
    frame.extend([0x0a, 0xea, 0x06, 0xe6]);
    frame
}

fn write_key(nic: &mut Nic, place: Place, first: u64) {
    for (offset, value) in (first..).step_by(4).zip(KEY) {
        write(nic, place, offset, value);
    }
}

/// Without virtualization: entry `n` of the table has queue `n` modulo `queues`.
fn alone(model: Model, command: u32, queues: u32) -> Nic {
    let mut nic = Nic::with_model(model, MAC);
    write_key(&mut nic, PF, 0x5c80);
    let entries = |n: u32| u32::from_le_bytes([0, 1, 2, 3].map(|m| ((4 * n + m) % queues).to_le_bytes()[0]));
    for n in 0..32 {
        write(&mut nic, PF, 0x5c00 + 4 * u64::from(n), entries(n));
    }
    for n in 0..96 {
        write(&mut nic, PF, 0xee80 + 4 * u64::from(n), entries(n + 32));
    }
    write(&mut nic, PF, MRQC, command);
    nic
}

/// X21: RSS.
#[test]
fn each_type_of_frame_has_its_hash_and_its_number() {
    let (tcp4, ip4, tcp6, ip6) = (0x51cc_c178, 0x323e_8fc2, 0x4020_7d3d, 0x2cc1_8cd5);
    for (bits, frame, hash, kind) in [
        (1 << 16, ipv4(6, 0), tcp4, 1),
        (1 << 17, ipv4(6, 0), ip4, 2),
        (3 << 16, ipv4(6, 0), tcp4, 1),
        (1 << 22, ipv4(17, 0), tcp4, 7),
        (1 << 17, ipv4(17, 0), ip4, 2),
        (FIELDS, ipv4(1, 0), ip4, 2),
        (FIELDS, ipv4(132, 0), ip4, 2),
        (FIELDS, ipv4(6, 0x20), ip4, 2),
        (1 << 16, ipv4(17, 0), 0, 0),
        (1 << 16, ipv4(6, 0x20), 0, 0),
        (1 << 21, ipv6(6), tcp6, 3),
        (1 << 20, ipv6(6), ip6, 5),
        (1 << 23, ipv6(17), tcp6, 8),
        (FIELDS, ipv6(58), ip6, 5),
        (FIELDS, ipv6(0), ip6, 5),
        (3 << 16, ipv6(6), 0, 0),
        (3 << 18, ipv6(6), 0, 0),
        (0, ipv4(6, 0), 0, 0),
    ] {
        let nic = alone(Model::X550, 1 | bits, 16);
        let steered = nic.rss(0).queue_of(&frame);
        let queue = u16::try_from(hash % 16).unwrap();
        assert_eq!(steered, Steered { queue, hash, kind }, "{bits:#x} {frame:x?}");
    }
}

#[test]
fn frames_without_headers_are_for_queue_0() {
    let rss = alone(Model::X550, 1 | FIELDS, 16).rss(0);
    for frame in [&ipv4(6, 0)[..37], &ipv6(6)[..57], &[2; 13], &[], &[&[2; 12][..], &[8, 6, 0, 1]].concat()] {
        assert_eq!(rss.queue_of(frame), Steered::default(), "{frame:x?}");
    }
    let mut tagged = ipv4(6, 0);
    tagged.splice(12..12, [0x81, 0, 0, 7]);
    assert_eq!(rss.queue_of(&tagged), rss.queue_of(&ipv4(6, 0)), "a tag does not change the hash");
}

/// X21: RSS.
/// MRQC, pool mode, virtualization: model, and the queue of a frame with hash 51CCC178h.
#[test]
fn each_mode_of_the_nic_has_its_queues() {
    for (model, command, queue) in [
        (Model::X550, 0, 0),
        (Model::X550, 1, 0x178 % 64),
        (Model::X540, 1, 0x78 & 0xf),
        (Model::X550, 4, 0x78 & 0xf),
        (Model::X550, 5, 0x78 & 0xf),
        (Model::X550, 2, 0),
        (Model::X550, 8, 0),
        (Model::X550, 0xa, 0),
    ] {
        let nic = alone(model, command | FIELDS, 64);
        assert_eq!(nic.rss(0).queue_of(&ipv4(6, 0)).queue, queue, "{model} {command:#x}");
    }
}

/// The entries of the table that a pool shares: 2 bits with 4 queues, 1 bit with 2.
#[test]
fn pools_use_as_many_bits_as_they_have_queues() {
    for (vt_mode, command, queue) in [(2, 0xa, 3), (3, 0xb, 1), (1, 0xc, 0), (2, 8, 0), (2, 0xb, 0), (3, 0xa, 0)] {
        for model in [Model::X550, Model::X540] {
            let mut nic = alone(model, command | FIELDS, 64);
            write(&mut nic, PF, 0x5c00 + (0x78 & !3), u32::from_le_bytes([0x3f; 4]));
            write(&mut nic, PF, 0x11050, vt_mode);
            write(&mut nic, PF, 0x51b0, 1);
            for pool in [0, 31, 63] {
                assert_eq!(nic.rss(pool).queue_of(&ipv4(6, 0)).queue, queue, "{model} {vt_mode} {command:#x} {pool}");
            }
        }
    }
}

/// The values that Linux writes for up to 31 VFs, and for more.
/// Receive, transmit and the VFs' registers agree on the queues.
#[test]
fn drivers_set_the_same_pools_in_all_three_registers() {
    for (gcr_ext, mrqc, mtqc, pools, per_pool) in [(2, 0xa, 0xa, 32, 4), (3, 0xb, 6, 64, 2)] {
        let mut nic = alone(Model::X550, mrqc | FIELDS, 64);
        write(&mut nic, PF, 0x51b0, 1);
        write(&mut nic, PF, 0x11050, gcr_ext);
        assert_eq!(stored(&mut nic, PF, 0x8120, mtqc), mtqc);
        assert_eq!(nic.switching().pools, pools);
        for pool in 0..pools {
            assert_eq!(nic.pool(pool).queues, pool * per_pool..(pool + 1) * per_pool);
        }
        assert!(nic.rss(0).queue_of(&ipv4(6, 0)).queue < per_pool);
    }
}

/// A pool with RSS of its own, which its VF writes.
fn own(nic: &mut Nic, index: u16, command: u32, queues: u8) {
    let vf = Place::Vf(index);
    write_key(nic, vf, 0x3100);
    for n in 0..16 {
        write(nic, vf, 0x3200 + 4 * n, u32::from_le_bytes([0, 1, 2, 3].map(|n| n % queues)));
    }
    write(nic, vf, 0x3000, command);
}

/// X22: RSS of pools.
#[test]
fn a_vf_of_an_x550_has_rss_of_its_own() {
    let mut nic = nic();
    write(&mut nic, PF, MRQC, 0xa | MULTIPLE);
    own(&mut nic, 1, 1 | FIELDS, 4);
    own(&mut nic, 2, FIELDS, 4);
    let frame = [ipv4(6, 0), ipv4(1, 0), ipv6(6)];
    let queues = |rss: Rss| frame.each_ref().map(|frame| rss.queue_of(frame).queue);
    assert_eq!(
        queues(nic.rss(1)),
        [0x51cc_c178u32, 0x323e_8fc2, 0x4020_7d3d].map(|hash| u16::from(hash.to_le_bytes()[0] & 3))
    );
    assert_eq!((queues(nic.rss(2)), queues(nic.rss(0))), ([0; 3], [0; 3]), "not enabled");
    assert!(nic.rss(1).is_enabled() && !nic.rss(2).is_enabled());
    let _ = nic.reset_vf(1);
    assert!(!nic.rss(1).is_enabled(), "until its driver sets it up again");
    assert_eq!(nic.rss(1000), nic.rss(63), "no such pool");
}

/// X22: RSS of pools.
#[test]
fn the_vfs_of_an_x540_share_the_rss_of_the_pf() {
    let mut nic = Nic::with_model(Model::X540, MAC);
    let _ = nic.set_num_vfs(4);
    for (offset, value) in [(0x11050, 2), (0x51b0, 1), (MRQC, 0xa | MULTIPLE | FIELDS)] {
        write(&mut nic, PF, offset, value);
    }
    write_key(&mut nic, PF, 0x5c80);
    own(&mut nic, 1, 1 | FIELDS, 4);
    assert_eq!([0x3000, 0x3100, 0x3200].map(|offset| stored(&mut nic, Place::Vf(1), offset, 1)), [0; 3]);
    assert_eq!(nic.rss(1), nic.rss(0));
    assert_eq!(nic.rss(1).queue_of(&ipv4(6, 0)).hash, 0x51cc_c178);
}

#[test]
fn effects_name_what_rss_follows() {
    for (place, offset, value, steering) in [
        (PF, MRQC, 1, true),
        (PF, MRQC, 0, false),
        (PF, 0x5c00, 1, true),
        (PF, 0x5c7c, 1, true),
        (PF, 0x5c80, 1, true),
        (PF, 0x5ca4, 1, true),
        (PF, 0xee80, 1, true),
        (PF, 0xeffc, 1, true),
        (PF, 0x3400, 1, true),
        (PF, 0x18000, 1, true),
        (PF, 0x19ffc, 1, true),
        (PF, 0x51b0, 0, true),
        (PF, 0x11050, 3, true),
        (Place::Vf(1), 0x3000, 1, true),
        (Place::Vf(1), 0x3100, 1, true),
        (Place::Vf(1), 0x323c, 1, true),
        (PF, 0xee40, 1, true),
        (PF, 0xee18, 1, false),
        (PF, 0x8120, 6, false),
    ] {
        assert_eq!(effects(&mut nic(), place, offset, value).steering, steering, "{offset:#x}");
    }
}
