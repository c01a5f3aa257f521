//! Routing IDs of VFs.

use super::*;

/// G20: the routing IDs that exist.
#[test]
fn exactly_the_enabled_vfs_have_routing_ids() {
    for num_vfs in [0, 1, 2, 255, 300] {
        let sriov = enabled(300, num_vfs);
        let answering: Vec<_> = (0..=u16::MAX)
            .map(Rid::from_bits)
            .filter_map(|rid| sriov.vf_index(pf(), rid).map(|index| (index, rid)))
            .collect();
        let expected: Vec<_> = (0..num_vfs).map(|i| (VfIndex(i), Rid::from_bits(0x100 + i))).collect();
        assert_eq!(answering, expected);
    }
}

/// G22: VFs beyond devfn FFh.
#[test]
fn the_256th_vf_is_on_the_next_bus() {
    let sriov = enabled(300, 300);
    assert_eq!(sriov.vf_rid(pf(), VfIndex(255)).unwrap().to_string(), "01:1f.7");
    assert_eq!(sriov.vf_rid(pf(), VfIndex(256)).unwrap().to_string(), "02:00.0");
    assert_eq!(sriov.vf_rid(pf(), VfIndex(300)), None);
}

/// B15: numbers of VFs that do not fit a byte.
#[test]
fn counts_around_a_byte_are_counts() {
    for total in [1, 127, 128, 255, 256, 1024] {
        let sriov = enabled(total, total);
        assert_eq!(sriov.num_visible(), total);
        assert_eq!(windows(&sriov)[0].len, u64::from(total) * 0x2000);
        let last = VfIndex(total - 1);
        assert_eq!(sriov.vf_index(pf(), sriov.vf_rid(pf(), last).unwrap()), Some(last));
        assert_eq!(sriov.locate(bar(2), u64::from(total) * 0x2000 - 1), Some((last, 0x1fff)));
    }
}

/// B18: one VF, stride 0.
#[test]
fn a_single_vf_may_have_stride_0() {
    let mut sriov = Sriov::new(SriovShape { vf_stride: 0, ..shape(1) }, &RC).unwrap();
    word(&mut sriov, NUM_VFS, 1);
    word(&mut sriov, CONTROL, 9);
    assert_eq!(sriov.vf_index(pf(), Rid::from_bits(0x100)), Some(VfIndex(0)));
    assert_eq!(sriov.vf_index(pf(), Rid::from_bits(0x101)), None);
    assert_eq!(sriov.vf_index(pf(), pf()), None);
}

#[test]
fn a_stride_skips_the_functions_between() {
    let mut sriov = Sriov::new(SriovShape { vf_stride: 2, ..shape(4) }, &RC).unwrap();
    word(&mut sriov, NUM_VFS, 4);
    word(&mut sriov, CONTROL, 1);
    let present: Vec<_> = (0x100..0x10a).filter(|&rid| sriov.vf_index(pf(), Rid::from_bits(rid)).is_some()).collect();
    assert_eq!(present, [0x100, 0x102, 0x104, 0x106]);
}
