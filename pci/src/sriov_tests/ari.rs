//! The capability of an Endpoint behind a port: ARI Capable Hierarchy, and the VFs' routing IDs with and without it.

use super::*;
use crate::port::{EndpointShape, Link, LinkSpeed, LinkWidth};

const ARI: u16 = sriov::ARI_CAPABLE_HIERARCHY;

fn endpoint(ari: Option<Ari>) -> PortType {
    let link = Link { speed: LinkSpeed::Gt2_5, width: LinkWidth::X1 };
    PortType::Endpoint(EndpointShape { link, ari, acs: false })
}

/// VFs on the next bus, and with ARI directly after the PF.
fn with_ari() -> Sriov {
    let vfs = Some(VfRouting { first_vf_offset: 1, vf_stride: 1 });
    let shape = SriovShape { first_vf_offset: 0x100, ..shape(300) };
    Sriov::new(shape, &endpoint(Some(Ari { vfs }))).unwrap()
}

fn behind_port(first_vf_offset: u16, vf_stride: u16, total_vfs: u16) -> Result<Sriov, SriovError> {
    Sriov::new(SriovShape { first_vf_offset, vf_stride, ..shape(total_vfs) }, &endpoint(Some(Ari::default())))
}

/// G3: the bits of Control in an Endpoint.
#[test]
fn only_an_endpoint_with_ari_has_ari_capable_hierarchy() {
    for (mut sriov, control, capabilities) in
        [(with_ari(), 0x0019, 2), (behind_port(0x100, 1, 8).unwrap(), 0x0019, 2), (sriov(8), 0x0009, 0)]
    {
        word(&mut sriov, CONTROL, 0xffff);
        assert_eq!((read(&sriov, CONTROL), read(&sriov, sriov::CAPABILITIES)), (control, capabilities));
        assert_eq!(sriov.ari_capable_hierarchy(), control & u32::from(ARI) != 0);
    }
}

/// G8: First VF Offset and VF Stride change only with ARI Capable Hierarchy.
#[test]
fn the_vfs_are_where_the_port_above_forwards_to() {
    let mut sriov = with_ari();
    let pf = Rid::new(1, 0, 0).unwrap();
    for (control, registers, first, last) in
        [(0, 0x0001_0100, "02:00.0", "03:05.3"), (ARI, 0x0001_0001, "01:00.1", "02:05.4")]
    {
        assert!(word(&mut sriov, CONTROL, control).is_none());
        for num_vfs in [0, 1, 300] {
            word(&mut sriov, NUM_VFS, num_vfs);
            assert_eq!(read(&sriov, sriov::OFFSET_STRIDE), registers);
        }
        let rid = |index| sriov.vf_rid(pf, VfIndex(index)).unwrap().to_string();
        assert_eq!((rid(0), rid(299)), (first.to_string(), last.to_string()));
        word(&mut sriov, CONTROL, control | 1);
        for index in [0, 255, 299].map(VfIndex) {
            let rid = sriov.vf_rid(pf, index).unwrap();
            assert_eq!(sriov.vf_index(pf, rid), Some(index));
        }
        word(&mut sriov, CONTROL, control);
    }
}

#[test]
fn vfs_that_exist_do_not_move() {
    let mut sriov = with_ari();
    word(&mut sriov, NUM_VFS, 3);
    assert_eq!(word(&mut sriov, CONTROL, ARI | 9).vfs, Some(VfChange::Enabled { num_vfs: 3 }));
    let effects = word(&mut sriov, CONTROL, 9);
    assert_eq!((effects.is_none(), effects.refused), (true, Some(Refused::AriCapableHierarchy)));
    assert_eq!(read(&sriov, CONTROL), 0x0019);
    // VF Enable before the write counts.
    let effects = word(&mut sriov, CONTROL, 0);
    assert_eq!(
        (effects.vfs, effects.refused),
        (Some(VfChange::Disabled { num_vfs: 3 }), Some(Refused::AriCapableHierarchy))
    );
    assert!(word(&mut sriov, CONTROL, 0).refused.is_none());
    assert_eq!(read(&sriov, CONTROL), 0);
}

/// G38, G39: the ARI bit after a function level reset, and after a conventional one.
#[test]
fn ari_capable_hierarchy_outlives_a_function_level_reset_alone() {
    let mut sriov = with_ari();
    word(&mut sriov, NUM_VFS, 3);
    word(&mut sriov, CONTROL, 0x0019);
    assert_eq!(sriov.reset(ResetKind::Flr).vfs, Some(VfChange::Disabled { num_vfs: 3 }));
    assert_eq!((read(&sriov, CONTROL), read(&sriov, NUM_VFS)), (0x0010, 0));
    assert!(sriov.reset(ResetKind::Conventional).is_none());
    assert_eq!(sriov, with_ari());
}

/// B20: VFs that the port above would hide are an error when configured.
#[test]
fn without_ari_vfs_are_functions_1_to_7_or_on_other_buses() {
    for (offset, stride, total) in [(1, 1, 7), (0x100, 1, 300), (0xff, 1, 8), (0x200, 2, 100), (1, 0x100, 9), (7, 0, 1)]
    {
        assert!(behind_port(offset, stride, total).is_ok(), "{offset} {stride} {total}");
    }
    for (offset, stride, total) in [(1, 1, 8), (8, 1, 1), (0xf8, 1, 1), (2, 2, 4)] {
        let hidden = SriovError::Hidden { first_vf_offset: offset, vf_stride: stride };
        assert_eq!(behind_port(offset, stride, total).unwrap_err(), hidden);
    }
    let text = behind_port(1, 1, 255).unwrap_err().to_string();
    assert!(text.starts_with("First VF Offset 1 and VF Stride 1 place VFs where a port without ARI Forwarding hides"));
    let vfs = Some(VfRouting { first_vf_offset: 0, vf_stride: 1 });
    let ari = Some(Ari { vfs });
    let overlap = Sriov::new(SriovShape { first_vf_offset: 0x100, ..shape(2) }, &endpoint(ari));
    assert!(matches!(overlap, Err(SriovError::Overlap { first_vf_offset: 0, .. })), "with ARI, too");
}

#[test]
fn function_numbers_above_7_need_ari() {
    let shape = SriovShape { function_dependency_link: 9, first_vf_offset: 0x100, ..shape(2) };
    assert_eq!(Sriov::new(shape.clone(), &RC), Err(SriovError::FunctionDependencyLink(9)));
    assert!(Sriov::new(shape, &endpoint(Some(Ari::default()))).is_ok());
}

/// B20: a PF without ARI is possible only on a root bus.
#[test]
fn an_endpoint_needs_ari_for_its_vfs() {
    let shape = SriovShape { first_vf_offset: 0x100, ..shape(2) };
    assert_eq!(Sriov::new(shape.clone(), &endpoint(None)), Err(SriovError::NoAri));
    assert!(Sriov::new(shape.clone(), &endpoint(Some(Ari::default()))).is_ok());
    assert!(Sriov::new(shape, &RC).is_ok());
}
