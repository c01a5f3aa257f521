//! The rules of the SR-IOV capability. `G` and `B` numbers: docs/testing.md, Conformance.
#![expect(unused_must_use, reason = "most writes here are made for the registers that they change")]

use super::*;

const CONTROL: u16 = sriov::CONTROL_STATUS;
const NUM_VFS: u16 = sriov::NUM_VFS_FDL;
const PAGE_SIZE: u16 = sriov::SYSTEM_PAGE_SIZE;

fn bar(n: u8) -> BarIndex {
    BarIndex::new(n).unwrap()
}

fn shape(total_vfs: u16) -> SriovShape {
    SriovShape {
        total_vfs,
        first_vf_offset: 0xe8,
        vf_stride: 1,
        vf_device_id: 0x1041,
        bars: vec![
            (bar(2), BarKind::Memory64 { size: 0x2000, prefetchable: true }),
            (bar(4), BarKind::Memory64 { size: 0x1000, prefetchable: true }),
        ],
        function_dependency_link: 0,
    }
}

fn sriov(total_vfs: u16) -> Sriov {
    Sriov::new(shape(total_vfs)).unwrap()
}

fn pf() -> Rid {
    Rid::new(0, 3, 0).unwrap()
}

fn read(sriov: &Sriov, offset: u16) -> u32 {
    sriov.read(Dword::containing(offset))
}

fn write(sriov: &mut Sriov, offset: u16, value: u32) -> Effects {
    sriov.write(Dword::containing(offset), DwordWrite::full(value))
}

fn word(sriov: &mut Sriov, offset: u16, value: u16) -> Effects {
    let (value, enables) = if offset & 2 == 0 { (u32::from(value), 0b0011) } else { (u32::from(value) << 16, 0b1100) };
    sriov.write(Dword::containing(offset), DwordWrite::new(value, enables))
}

fn enabled(total_vfs: u16, num_vfs: u16) -> Sriov {
    let mut sriov = sriov(total_vfs);
    write(&mut sriov, sriov::VF_BAR0 + 8, 0x1000_0000);
    write(&mut sriov, sriov::VF_BAR0 + 12, 0x80);
    write(&mut sriov, sriov::VF_BAR0 + 16, 0x2000_0000);
    word(&mut sriov, NUM_VFS, num_vfs);
    word(&mut sriov, CONTROL, 0x0009);
    sriov
}

fn windows(sriov: &Sriov) -> Vec<Window> {
    let mut windows = Vec::new();
    sriov.windows(&mut windows);
    windows
}

/// G2: the image of power-on.
#[test]
fn power_on_is_no_vf_and_4_kib_pages() {
    let image: Vec<_> = (0..sriov::LEN).step_by(4).map(|offset| read(&sriov(8), offset)).collect();
    let expected = [0x0001_0010, 0, 0, 0x0008_0008, 0, 0x0001_00e8, 0x1041_0000, 0x553, 1, 0, 0, 0xc, 0, 0xc, 0, 0];
    assert_eq!(image, expected);
}

/// G3: what Control holds; the ARI bit is not for a Root Complex Integrated Endpoint.
#[test]
fn control_holds_vf_enable_and_vf_mse_only() {
    let mut sriov = sriov(8);
    word(&mut sriov, CONTROL, 0xffff);
    assert_eq!(read(&sriov, CONTROL), 0x0009);
}

/// G4: read-only registers, Status and Function Dependency Link among them.
#[test]
fn read_only_registers_ignore_every_width() {
    let whole = [0x00, 0x04, 0x0c, 0x14, 0x18, 0x1c, 0x3c].map(|offset| (offset, 0b1111));
    for (offset, fixed) in whole.into_iter().chain([(CONTROL, 0b1100), (NUM_VFS, 0b1100)]) {
        for enables in (0..16).filter(|enables| enables & !fixed == 0) {
            let mut sriov = sriov(8);
            let before = sriov.clone();
            assert!(sriov.write(Dword::containing(offset), DwordWrite::new(u32::MAX, enables)).is_none());
            assert_eq!(sriov, before, "{offset:#x} {enables:04b}");
        }
    }
}

/// G5, B2: NumVFs while VFs exist and while none do.
#[test]
fn num_vfs_is_locked_while_vf_enable_is_set() {
    let mut sriov = sriov(8);
    for num_vfs in 0..=8 {
        word(&mut sriov, NUM_VFS, num_vfs);
        assert_eq!(read(&sriov, NUM_VFS), u32::from(num_vfs));
    }
    word(&mut sriov, CONTROL, 1);
    for enables in 1..16 {
        sriov.write(Dword::containing(NUM_VFS), DwordWrite::new(0x0003_0303, enables));
        assert_eq!((read(&sriov, NUM_VFS), sriov.num_visible()), (8, 8), "{enables:04b}");
    }
    word(&mut sriov, CONTROL, 0);
    word(&mut sriov, NUM_VFS, 3);
    assert_eq!((read(&sriov, NUM_VFS), sriov.num_visible()), (3, 0), "what is set is not what is enabled");
}

/// G6, B1, B3: more VFs than there are; what counts is the register after its mask.
#[test]
fn vf_enable_is_ignored_while_num_vfs_exceeds_total() {
    for num_vfs in [9, 0x100, 0xffff] {
        let mut sriov = sriov(8);
        word(&mut sriov, NUM_VFS, num_vfs);
        let effects = word(&mut sriov, CONTROL, 0x0009);
        assert_eq!((read(&sriov, CONTROL), effects.vfs, sriov.num_visible()), (0x0008, None, 0));
        assert!(windows(&sriov).is_empty());
        word(&mut sriov, NUM_VFS, 8);
        assert_eq!(word(&mut sriov, CONTROL, 0x0009).vfs, Some(VfChange::Enabled { num_vfs: 8 }));
    }
}

/// B5: VF Enable with NumVFs 0.
#[test]
fn vf_enable_without_vfs_is_harmless() {
    let mut sriov = sriov(8);
    assert_eq!(word(&mut sriov, CONTROL, 0x0009).vfs, Some(VfChange::Enabled { num_vfs: 0 }));
    assert!(windows(&sriov).is_empty());
    assert_eq!(word(&mut sriov, CONTROL, 0).vfs, Some(VfChange::Disabled { num_vfs: 0 }));
}

/// B6: NumVFs when VF Enable is cleared.
#[test]
fn num_vfs_outlives_vf_disable() {
    let mut sriov = enabled(8, 5);
    word(&mut sriov, CONTROL, 0);
    assert_eq!((read(&sriov, NUM_VFS), sriov.num_vfs(), sriov.num_visible()), (5, 5, 0));
}

/// G7: System Page Size.
#[test]
fn system_page_size_takes_one_supported_size() {
    let mut sriov = sriov(8);
    for bit in 0..32 {
        let old = read(&sriov, PAGE_SIZE);
        write(&mut sriov, PAGE_SIZE, 1 << bit);
        let expected = if sriov::PAGE_SIZES & 1 << bit != 0 { 1 << bit } else { old };
        assert_eq!(read(&sriov, PAGE_SIZE), expected);
    }
    write(&mut sriov, PAGE_SIZE, 0x10);
    for bad in [0, 0x3, 0x553, 0x2000_0000, u32::MAX] {
        write(&mut sriov, PAGE_SIZE, bad);
        assert_eq!(read(&sriov, PAGE_SIZE), 0x10, "{bad:#x}");
    }
    word(&mut sriov, CONTROL, 1);
    write(&mut sriov, PAGE_SIZE, 1);
    assert_eq!((read(&sriov, PAGE_SIZE), sriov.aperture(bar(2))), (0x10, 0x1_0000));
}

/// G8: First VF Offset and VF Stride.
#[test]
fn offset_and_stride_are_the_same_for_every_num_vfs() {
    let mut sriov = sriov(300);
    for num_vfs in (0..=301).chain([0xffff]) {
        for control in [0, 9, 0] {
            word(&mut sriov, NUM_VFS, num_vfs);
            word(&mut sriov, CONTROL, control);
            assert_eq!(read(&sriov, sriov::OFFSET_STRIDE), 0x0001_00e8, "NumVFs {num_vfs}");
        }
    }
}

/// G9: accesses to a part of a dword, and to registers that share one.
#[test]
fn accesses_to_a_half_leave_the_other_alone() {
    let mut sriov = sriov(8);
    write(&mut sriov, NUM_VFS, 0xffff_0004);
    assert_eq!(read(&sriov, NUM_VFS), 4);
    write(&mut sriov, CONTROL, 0xffff_0008);
    assert_eq!(read(&sriov, CONTROL), 0x0008);
    let byte = sriov.write(Dword::containing(CONTROL), DwordWrite::new(0xffff_ff01, 0b0001));
    assert_eq!((read(&sriov, CONTROL), byte.vfs), (1, Some(VfChange::Enabled { num_vfs: 4 })));
}

/// G10: what `lspci -vv` computes from the capability.
#[test]
fn lspci_finds_what_the_shape_says() {
    let sriov = sriov(8);
    let half = |offset: u16| read(&sriov, offset & !3) >> (8 * (offset & 2)) & 0xffff;
    let lines = [
        format!(
            "Initial VFs: {}, Total VFs: {}, Number of VFs: {}, Function Dependency Link: {:02x}",
            half(0x0c),
            half(0x0e),
            half(0x10),
            half(0x12) & 0xff
        ),
        format!("VF offset: {}, stride: {}, Device ID: {:04x}", half(0x14), half(0x16), half(0x1a)),
        format!("Supported Page Size: {:08x}, System Page Size: {:08x}", read(&sriov, 0x1c), read(&sriov, 0x20)),
    ];
    let expected = [
        "Initial VFs: 8, Total VFs: 8, Number of VFs: 0, Function Dependency Link: 00",
        "VF offset: 232, stride: 1, Device ID: 1041",
        "Supported Page Size: 00000553, System Page Size: 00000001",
    ];
    assert_eq!(lines, expected);
    assert_eq!((sriov.shape(), sriov.total_vfs()), (&shape(8), 8));
    let other = Sriov::new(SriovShape { function_dependency_link: 5, ..shape(8) }).unwrap();
    assert_eq!(read(&other, NUM_VFS), 0x0005_0000, "a PF that is function 5 says so");
}

/// G11, G12: VF BARs are sized as BARs are, and say how much one VF takes.
#[test]
fn sizing_a_vf_bar_tells_the_slice_of_one_vf() {
    let mut sriov = Sriov::new(SriovShape {
        bars: vec![(bar(0), BarKind::Memory32 { size: 0x4000 }), (bar(2), shape(1).bars[0].1)],
        ..shape(8)
    })
    .unwrap();
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

/// G13: slices are as large as the page, for every supported one.
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
fn a_new_page_size_keeps_the_types_and_the_addresses_as_far_as_they_are_aligned() {
    let mut sriov = sriov(8);
    write(&mut sriov, sriov::VF_BAR0 + 8, 0x1234_6000);
    write(&mut sriov, sriov::VF_BAR0 + 12, 1);
    write(&mut sriov, PAGE_SIZE, 1);
    assert_eq!(read(&sriov, sriov::VF_BAR0 + 8), 0x1234_600c);
    write(&mut sriov, PAGE_SIZE, 0x10);
    assert_eq!((read(&sriov, sriov::VF_BAR0 + 8), read(&sriov, sriov::VF_BAR0 + 12)), (0x1234_000c, 1));
}

#[test]
fn a_guest_with_large_pages_can_restore_its_bars_before_its_page_size() {
    let mut sriov = sriov(8);
    write(&mut sriov, sriov::VF_BAR0 + 8, 0x1235_0000);
    write(&mut sriov, PAGE_SIZE, 0x10);
    assert_eq!(read(&sriov, sriov::VF_BAR0 + 8), 0x1235_000c);
}

/// G16: what VFs decode with each of VF Enable and VF MSE.
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
        Window { id: WindowId::VfBar(bar(2)), base: 0x80_1000_0000, len: 3 * 0x2000 },
        Window { id: WindowId::VfBar(bar(4)), base: 0x2000_0000, len: 3 * 0x1000 },
    ];
    assert_eq!(windows(&enabled(8, 3)), expected);
}

/// B14: the slice that sizing tells, the one that is decoded and the one that an access is in.
#[test]
fn the_last_byte_of_the_last_vf_is_where_sizing_says() {
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
    // A BAR of 64 bits is written in two steps, and decodes what the registers say after each of them.
    let bases = |sriov: &Sriov| windows(sriov).iter().map(|window| window.base).collect::<Vec<_>>();
    write(&mut sriov, sriov::VF_BAR0 + 8, 0xffff_c000);
    write(&mut sriov, sriov::VF_BAR0 + 12, 0);
    assert_eq!(windows(&sriov)[0], Window { id: WindowId::VfBar(bar(2)), base: 0xffff_c000, len: 0x6000 });
    write(&mut sriov, sriov::VF_BAR0 + 8, 0x2000);
    assert_eq!(bases(&sriov), [0x2000, 0x2000_0000]);
    write(&mut sriov, sriov::VF_BAR0 + 12, 1);
    assert_eq!(bases(&sriov), [0x1_0000_2000, 0x2000_0000]);
    // Past the end of the address space nothing decodes.
    write(&mut sriov, sriov::VF_BAR0 + 12, u32::MAX);
    write(&mut sriov, sriov::VF_BAR0 + 8, u32::MAX);
    assert_eq!(windows(&sriov).len(), 1);
}

/// G20: which routing IDs exist.
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
    let mut sriov = Sriov::new(SriovShape { vf_stride: 0, ..shape(1) }).unwrap();
    word(&mut sriov, NUM_VFS, 1);
    word(&mut sriov, CONTROL, 9);
    assert_eq!(sriov.vf_index(pf(), Rid::from_bits(0x100)), Some(VfIndex(0)));
    assert_eq!(sriov.vf_index(pf(), Rid::from_bits(0x101)), None);
    assert_eq!(sriov.vf_index(pf(), pf()), None);
}

#[test]
fn a_stride_skips_the_functions_between() {
    let mut sriov = Sriov::new(SriovShape { vf_stride: 2, ..shape(4) }).unwrap();
    word(&mut sriov, NUM_VFS, 4);
    word(&mut sriov, CONTROL, 1);
    let present: Vec<_> = (0x100..0x10a).filter(|&rid| sriov.vf_index(pf(), Rid::from_bits(rid)).is_some()).collect();
    assert_eq!(present, [0x100, 0x102, 0x104, 0x106]);
}

/// G26: writes of the value that VF Enable has.
#[test]
fn writing_the_same_control_again_changes_nothing() {
    let mut sriov = enabled(8, 3);
    assert!(word(&mut sriov, CONTROL, 0x0009).is_none());
    let windows_alone = Effects { windows: true, ..Effects::NONE };
    assert_eq!(word(&mut sriov, CONTROL, 0x0001), windows_alone);
    assert_eq!(word(&mut sriov, CONTROL, 0x0009), windows_alone);
    let all = Effects { windows: true, messages: true, queues: true, vfs: None, reset: None };
    let gone = Effects { vfs: Some(VfChange::Disabled { num_vfs: 3 }), ..all };
    assert_eq!(word(&mut sriov, CONTROL, 0), gone);
    assert!(word(&mut sriov, CONTROL, 0).is_none());
}

/// G38, B7: the capability after a reset.
#[test]
fn reset_is_the_power_on_image() {
    let mut sriov = enabled(8, 3);
    word(&mut sriov, CONTROL, 0);
    write(&mut sriov, PAGE_SIZE, 0x400);
    word(&mut sriov, CONTROL, 9);
    assert_eq!(sriov.reset().vfs, Some(VfChange::Disabled { num_vfs: 3 }));
    assert_eq!(sriov, self::sriov(8));
    assert!(sriov.reset().is_none());
}

/// B20, B21: what cannot be is an error when it is configured.
#[test]
fn impossible_shapes_are_refused() {
    let error = |change: fn(&mut SriovShape)| {
        let mut shape = shape(2);
        change(&mut shape);
        Sriov::new(shape).unwrap_err()
    };
    assert_eq!(error(|shape| shape.total_vfs = 0), SriovError::NoVfs);
    assert!(matches!(error(|shape| shape.first_vf_offset = 0), SriovError::Overlap { .. }));
    assert!(matches!(error(|shape| shape.vf_stride = 0), SriovError::Overlap { .. }));
    assert!(matches!(error(|shape| shape.vf_stride = 0xffff), SriovError::RoutingIds { .. }));
    assert!(matches!(error(|shape| shape.bars.push((bar(3), BarKind::Memory32 { size: 16 }))), SriovError::Bar(_)));
}
