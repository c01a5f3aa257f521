//! The rules of the SR-IOV capability: its registers. `G` and `B` numbers: docs/conformance.md.
#![expect(unused_must_use, reason = "most writes here are made for the registers that they change")]

use super::*;

const CONTROL: u16 = sriov::CONTROL_STATUS;
const NUM_VFS: u16 = sriov::NUM_VFS_FDL;
const PAGE_SIZE: u16 = sriov::SYSTEM_PAGE_SIZE;
const RC: PortType = PortType::RcIntegratedEndpoint;

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
    Sriov::new(shape(total_vfs), &RC).unwrap()
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

/// G3: the bits of Control; a Root Complex Integrated Endpoint has no ARI bit.
#[test]
fn control_holds_vf_enable_and_vf_mse_only() {
    let mut sriov = sriov(8);
    word(&mut sriov, CONTROL, 0xffff);
    assert_eq!(read(&sriov, CONTROL), 0x0009);
}

/// G4: read-only registers, including Status and Function Dependency Link.
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

/// G5, B2: NumVFs with and without existing VFs.
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

/// G6, B1, B3: NumVFs above TotalVFs; the register after its mask counts.
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

/// G10: the values that `lspci -vv` computes from the capability.
#[test]
fn lspci_finds_the_registers_of_the_shape() {
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
    let other = Sriov::new(SriovShape { function_dependency_link: 5, ..shape(8) }, &RC).unwrap();
    assert_eq!(read(&other, NUM_VFS), 0x0005_0000, "a PF that is function 5 says so");
}

/// G26: writes of VF Enable's present value.
#[test]
fn writing_the_same_control_again_changes_nothing() {
    let mut sriov = enabled(8, 3);
    assert!(word(&mut sriov, CONTROL, 0x0009).is_none());
    let windows_alone = Effects { windows: true, ..Effects::NONE };
    assert_eq!(word(&mut sriov, CONTROL, 0x0001), windows_alone);
    assert_eq!(word(&mut sriov, CONTROL, 0x0009), windows_alone);
    let all = Effects { windows: true, messages: true, queues: true, ..Effects::NONE };
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
    assert_eq!(sriov.reset(ResetKind::Conventional).vfs, Some(VfChange::Disabled { num_vfs: 3 }));
    assert_eq!(sriov, self::sriov(8));
    assert!(sriov.reset(ResetKind::Conventional).is_none());
}

/// B20, B21: impossible shapes are an error when configured.
#[test]
fn impossible_shapes_are_refused() {
    let error = |change: fn(&mut SriovShape)| {
        let mut shape = shape(2);
        change(&mut shape);
        Sriov::new(shape, &RC).unwrap_err()
    };
    assert_eq!(error(|shape| shape.total_vfs = 0), SriovError::NoVfs);
    assert!(matches!(error(|shape| shape.first_vf_offset = 0), SriovError::Overlap { .. }));
    assert!(matches!(error(|shape| shape.vf_stride = 0), SriovError::Overlap { .. }));
    assert!(matches!(error(|shape| shape.vf_stride = 0xffff), SriovError::RoutingIds { .. }));
    assert_eq!(error(|shape| shape.function_dependency_link = 8), SriovError::FunctionDependencyLink(8));
    assert!(matches!(error(|shape| shape.bars.push((bar(3), BarKind::Memory32 { size: 128 }))), SriovError::Bar(_)));
}

/// B20: a VF BAR too large for any guest address.
#[test]
fn vf_bars_that_pass_the_address_space_are_refused() {
    let with = |kind, total_vfs| Sriov::new(SriovShape { bars: vec![(bar(0), kind)], ..shape(total_vfs) }, &RC);
    assert!(with(BarKind::Memory32 { size: 1 << 29 }, 8).is_ok(), "4 GiB in all");
    let error = with(BarKind::Memory32 { size: 1 << 29 }, 9).unwrap_err();
    assert!(error.to_string().starts_with("VF BAR 0: 9 VFs of 0x20000000 bytes do not fit its address space; "));
    assert!(with(BarKind::Memory64 { size: 1 << 60, prefetchable: true }, 16).is_ok());
    assert!(with(BarKind::Memory64 { size: 1 << 60, prefetchable: true }, 17).is_err());
}

#[path = "sriov_tests/ari.rs"]
mod ari;

#[path = "sriov_tests/refused.rs"]
mod refused;

#[path = "sriov_tests/routing_ids.rs"]
mod routing_ids;

#[path = "sriov_tests/slices.rs"]
mod slices;
