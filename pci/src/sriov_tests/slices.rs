//! Values and decoding of VF BARs, and the VF whose slice is accessed.

use super::*;
use crate::MemoryKind;

/// The kind of the VF BARs.
const KIND: MemoryKind = MemoryKind::Memory64 { prefetchable: true };

/// G11, G12: VF BARs are sized like BARs; the size is that of one VF.
#[test]
fn sizing_a_vf_bar_gives_the_slice_of_one_vf() {
    let bars = vec![(bar(0), BarKind::Memory32 { size: 0x4000 }), (bar(2), shape(1).bars[0].1)];
    let mut sriov = Sriov::new(SriovShape { bars, ..shape(8) }, &RC).unwrap();
    let power_on = [0, 0, 0xc, 0, 0, 0];
    let sized = [0xffff_c000, 0, 0xffff_e00c, 0xffff_ffff, 0, 0];
    for (n, (power_on, sized)) in (0..6).zip(power_on.into_iter().zip(sized)) {
        let offset = sriov::VF_BAR0 + 4 * n;
        assert_eq!(read(&sriov, offset), power_on, "VF BAR {n}");
        write(&mut sriov, offset, u32::MAX);
        assert_eq!(read(&sriov, offset), sized, "VF BAR {n}");
    }
    // The upper half has no type bits: bit 0 is an address bit there.
    write(&mut sriov, sriov::VF_BAR0 + 12, 1);
    assert_eq!(read(&sriov, sriov::VF_BAR0 + 12), 1);
}

/// G13: slices are at least as large as the page, for every supported one.
#[test]
fn a_larger_page_size_spreads_the_vfs() {
    for bit in [0, 1, 4, 6, 8, 10] {
        let mut sriov = sriov(8);
        write(&mut sriov, PAGE_SIZE, 1 << bit);
        write(&mut sriov, sriov::VF_BAR0 + 8, u32::MAX);
        let aperture = 0x2000.max(0x1000 << bit);
        assert_eq!(sriov.aperture(bar(2)), aperture);
        assert_eq!(u64::from(read(&sriov, sriov::VF_BAR0 + 8)), 0xffff_ffff & !(aperture - 1) | 0xc);
        word(&mut sriov, NUM_VFS, 8);
        word(&mut sriov, CONTROL, 1);
        for index in 0..8 {
            let offset = u64::from(index) * aperture;
            assert_eq!(sriov.locate(bar(2), offset + 5), Some((VfIndex(index), 5)));
            assert_eq!(sriov.locate(bar(2), offset + aperture - 1), Some((VfIndex(index), aperture - 1)));
        }
        assert_eq!(sriov.locate(bar(2), 8 * aperture), None);
    }
}

/// G14: VF BARs after a new System Page Size. The standard leaves it open; Linux restores BARs before the page size.
#[test]
fn a_new_page_size_keeps_vf_bar_types_and_aligned_addresses() {
    let mut sriov = sriov(8);
    write(&mut sriov, sriov::VF_BAR0 + 8, 0x1234_6000);
    write(&mut sriov, sriov::VF_BAR0 + 12, 1);
    write(&mut sriov, PAGE_SIZE, 1);
    assert_eq!(read(&sriov, sriov::VF_BAR0 + 8), 0x1234_600c);
    write(&mut sriov, PAGE_SIZE, 0x10);
    assert_eq!((read(&sriov, sriov::VF_BAR0 + 8), read(&sriov, sriov::VF_BAR0 + 12)), (0x1234_000c, 1));
}

#[test]
fn vf_bars_can_be_restored_before_a_large_page_size() {
    let mut sriov = sriov(8);
    write(&mut sriov, sriov::VF_BAR0 + 8, 0x1235_0000);
    write(&mut sriov, PAGE_SIZE, 0x10);
    assert_eq!(read(&sriov, sriov::VF_BAR0 + 8), 0x1235_000c);
}

/// G16: decoding of VFs with each of VF Enable and VF MSE.
#[test]
fn vfs_decode_only_with_vf_enable_and_vf_mse() {
    for (control, decodes) in [(0, false), (1, false), (8, false), (9, true)] {
        let mut sriov = enabled(8, 3);
        word(&mut sriov, CONTROL, control);
        assert_eq!(windows(&sriov).len(), if decodes { 2 } else { 0 }, "{control}");
    }
}

#[test]
fn a_window_is_as_long_as_the_vfs_that_exist() {
    let expected = [
        Window { id: WindowId::VfBar(bar(2)), base: 0x80_1000_0000, len: 3 * 0x2000, kind: KIND },
        Window { id: WindowId::VfBar(bar(4)), base: 0x2000_0000, len: 3 * 0x1000, kind: KIND },
    ];
    assert_eq!(windows(&enabled(8, 3)), expected);
}

/// B14: the slice according to sizing, to decoding and to an access.
#[test]
fn the_last_byte_of_the_last_vf_is_where_sizing_puts_it() {
    for (total, page) in [(1, 1), (127, 1), (127, 0x10), (255, 0x400)] {
        let mut sriov = sriov(total);
        write(&mut sriov, PAGE_SIZE, page);
        for bar in [bar(2), bar(4)] {
            let offset = sriov::VF_BAR0 + 4 * u16::from(bar.get());
            write(&mut sriov, offset, u32::MAX);
            let sized = u64::from(!(read(&sriov, offset) & !0xf)) + 1;
            write(&mut sriov, offset, 0);
            word(&mut sriov, NUM_VFS, total);
            word(&mut sriov, CONTROL, 9);
            let window = windows(&sriov).into_iter().find(|window| window.id == WindowId::VfBar(bar)).unwrap();
            assert_eq!(window.len, sized * u64::from(total));
            assert_eq!(sriov.locate(bar, window.len - 1), Some((VfIndex(total - 1), sized - 1)));
            assert_eq!(sriov.locate(bar, window.len), None);
            word(&mut sriov, CONTROL, 0);
        }
    }
}

/// G17: a VF BAR that moves.
#[test]
fn a_moved_vf_bar_moves_all_vfs_at_once() {
    let mut sriov = enabled(8, 3);
    assert!(write(&mut sriov, sriov::VF_BAR0 + 12, 0x90).windows);
    assert_eq!(windows(&sriov)[0].base, 0x90_1000_0000);
    assert!(!write(&mut sriov, sriov::VF_BAR0 + 12, 0x90).windows);
    // A BAR of 64 bits is written in two steps, and decodes the registers' value after each of them.
    let bases = |sriov: &Sriov| windows(sriov).iter().map(|window| window.base).collect::<Vec<_>>();
    write(&mut sriov, sriov::VF_BAR0 + 8, 0xffff_c000);
    write(&mut sriov, sriov::VF_BAR0 + 12, 0);
    assert_eq!(windows(&sriov)[0], Window { id: WindowId::VfBar(bar(2)), base: 0xffff_c000, len: 0x6000, kind: KIND });
    write(&mut sriov, sriov::VF_BAR0 + 8, 0x2000);
    assert_eq!(bases(&sriov), [0x2000, 0x2000_0000]);
    write(&mut sriov, sriov::VF_BAR0 + 12, 1);
    assert_eq!(bases(&sriov), [0x1_0000_2000, 0x2000_0000]);
    // Nothing decodes past the end of the address space.
    write(&mut sriov, sriov::VF_BAR0 + 12, u32::MAX);
    write(&mut sriov, sriov::VF_BAR0 + 8, u32::MAX);
    assert_eq!(windows(&sriov).len(), 1);
}
