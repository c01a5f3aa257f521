//! Resets, VFs that appear and disappear, and the drivers that are seen.

use super::*;
use crate::{Fault, Iommu};

const RECEIVE: Direction = Direction::Receive;
const TRANSMIT: Direction = Direction::Transmit;

#[test]
fn queues_run_while_their_function_may_move_data() {
    let (mut device, path) = enabled(4, 2);
    start(&mut device, Place::Vf(1));
    start(&mut device, Place::Pf);
    let (vf, pf) = ([(RECEIVE, 2), (TRANSMIT, 2)], [(RECEIVE, 127), (TRANSMIT, 127)]);
    let running = |queues: &[&[_]]| {
        let mut all: Vec<(Direction, u16)> = queues.concat();
        all.sort_unstable();
        all
    };
    assert_eq!(path.running(), running(&[&vf, &pf]));
    set_master(&mut device, rid(1), false);
    assert_eq!((path.running(), device.join()), (running(&[&pf]), 2));
    set_master(&mut device, rid(1), true);
    set_master(&mut device, PF, false);
    assert_eq!((path.running(), device.join()), (running(&[&vf]), 2));
    set_master(&mut device, PF, true);
    let _ = write_config(&mut device, PF, 0x44, 3);
    assert_eq!((path.running(), device.join()), (vec![], 4), "VFs sleep with their PF");
    assert_eq!(device.function_status(Some(VfIndex(1))).unwrap().stopped_by, Some(StoppedBy::PfD3hot));
    assert_eq!(device.function_status(Some(VfIndex(0))).unwrap().stopped_by, None, "no driver");
    let _ = write_config(&mut device, PF, 0x44, 0);
    assert_eq!(path.running(), running(&[&vf, &pf]));
}

/// X14: resets.
#[test]
fn a_reset_of_a_vf_stops_it_and_notifies_its_pf() {
    let (mut device, path) = enabled(4, 2);
    for place in [Place::Pf, Place::Vf(0), Place::Vf(1)] {
        set_up_msix(&mut device, place, 6);
        set_up_mailbox(&mut device, place);
    }
    start(&mut device, Place::Vf(0));
    start(&mut device, Place::Vf(1));
    let _ = write_bar(&mut device, Place::Vf(1), VF_MSIX_BAR, 2 * 16 + 12, 1);
    let _ = write(&mut device, Place::Pf, 0x4b04, 1);
    assert_eq!(pending(&mut device, Place::Vf(1)), 4);
    flr(&mut device, rid(1));
    assert_eq!((path.running(), device.join()), (vec![(RECEIVE, 0), (TRANSMIT, 0)], 2));
    assert_eq!((pending(&mut device, Place::Vf(1)), read(&mut device, Place::Pf, 0x700)), (0, 1 << 1));
    assert_eq!((arrived(&device, Place::Pf), messages(&device, Reach::Function(rid(1))).len()), (vec![5], 0));
    assert_eq!((driver(&device, Some(1)), is_up(&device, Some(0))), ((Status::empty(), ResetBy::Flr), true));
    // VFCTRL.RST leaves configuration space as it is.
    let _ = write(&mut device, Place::Pf, 0x700, u32::MAX);
    let effects = write(&mut device, Place::Vf(0), 0, 1 << 26);
    assert!(effects.queues, "its driver went down");
    assert_eq!((path.running(), device.join(), read(&mut device, Place::Pf, 0x700)), (vec![], 2, 1));
    let bound = Status::ACKNOWLEDGE | Status::DRIVER;
    assert_eq!(driver(&device, Some(0)), (bound, ResetBy::Driver));
}

#[test]
fn a_reset_of_the_pf_leaves_nothing_of_its_vfs() {
    for kind in [ResetKind::Flr, ResetKind::Conventional] {
        let (mut device, path) = enabled(63, 63);
        device.set_link(true);
        for place in [Place::Pf, Place::Vf(0), Place::Vf(62)] {
            set_up_msix(&mut device, place, 6);
            set_up_mailbox(&mut device, place);
            start(&mut device, place);
        }
        let _ = write(&mut device, Place::Pf, 0x18, 1 << 28);
        let _ = write_bar(&mut device, Place::Pf, MSIX_BAR, 5 * 16 + 12, 1);
        let _ = write(&mut device, Place::Vf(0), 0x2fc, 1);
        assert_eq!(pending(&mut device, Place::Pf), 1 << 5);
        let _ = path.take_calls();
        match kind {
            ResetKind::Flr => flr(&mut device, PF),
            ResetKind::Conventional => drop(device.reset(kind)),
        }
        assert_eq!((path.running(), device.join()), (vec![], 6));
        let mut expected = fresh();
        let _ = expected.set_link(true);
        // The event of the link is not repeated.
        let expected = x550::NicState { other: [0; 4], ..expected.save() };
        assert_eq!(device.nic().lock().save(), expected, "{kind:?}");
        assert_eq!(read(&mut device, Place::Pf, 8) >> 10 & 0xff, 0);
        assert_eq!(pending(&mut device, Place::Pf), 0);
        let cause = if kind == ResetKind::Flr { ResetBy::Flr } else { ResetBy::Conventional };
        assert_eq!(driver(&device, None), (Status::empty(), cause));
        let sriov = device.sriov_status().unwrap();
        assert_eq!((sriov.vf_enable, sriov.disabled_by), (false, cause));
        assert_eq!(path.take_calls(), [Call::Pools, Call::Moderation, Call::Queues], "told once");
    }
}

#[test]
fn vfs_that_are_disabled_return_in_their_reset_state() {
    let (mut device, path) = enabled(63, 63);
    for index in [0, 62] {
        set_up_msix(&mut device, Place::Vf(index), 3);
        set_up_mailbox(&mut device, Place::Vf(index));
        start(&mut device, Place::Vf(index));
        let _ = write(&mut device, Place::Vf(index), 0x2fc, 1 << 2);
    }
    assert!(is_up(&device, Some(62)));
    let _ = path.take_calls();
    let effects = disable(&mut device);
    assert!(effects.queues && effects.vfs.is_some());
    assert_eq!(path.take_calls(), [Call::Pools, Call::Queues]);
    assert_eq!((path.running(), device.join()), (vec![], 4));
    assert_eq!(device.sriov_status().unwrap().disabled_by, ResetBy::Driver);
    let status = device.function_status(Some(VfIndex(62))).unwrap();
    assert_eq!((status.exists, status.driver, status.reset_by), (false, Status::empty(), ResetBy::Conventional));
    // The PF's driver enables a queue of a pool that is no VF's.
    let _ = write(&mut device, Place::Pf, 0x1028, ENABLE);
    assert_eq!((path.running(), is_up(&device, Some(0))), (vec![(RECEIVE, 0)], false));
    let _ = write(&mut device, Place::Pf, 0x1028, 0);
    let _ = enable(&mut device, 63);
    for index in [0, 62] {
        let vf = Place::Vf(index);
        assert_eq!(
            (read(&mut device, vf, 0x140), read(&mut device, vf, 0x108), read(&mut device, vf, 0x1028)),
            (0, 0, 0)
        );
        assert_eq!((read_config(&device, rid(index), 4) & 4, read(&mut device, vf, 0x2fc) & 4), (0, 0));
    }
}

#[test]
fn a_pf_reset_by_its_driver_ends_the_drivers_of_vfs() {
    let (mut device, path) = enabled(4, 2);
    assert!(write(&mut device, Place::Pf, 0x18, 1 << 28).queues, "for watchers");
    start(&mut device, Place::Vf(1));
    assert!(is_up(&device, None) && is_up(&device, Some(1)) && !is_up(&device, Some(0)));
    // CTRL.RST
    assert!(write(&mut device, Place::Pf, 0, 1 << 26).queues);
    assert_eq!((path.running(), device.join()), (vec![], 2));
    for vf in [None, Some(1)] {
        assert_eq!(driver(&device, vf), (Status::ACKNOWLEDGE | Status::DRIVER, ResetBy::Driver));
    }
    assert_eq!(device.functions.num_visible(), 2, "VFs stay");
}

#[test]
fn a_removed_vf_is_gone_until_vfs_are_disabled() {
    let (mut device, path) = enabled(4, 2);
    start(&mut device, Place::Vf(1));
    let vf_1 = Some(VfIndex(1));
    device.inject(vf_1, Fault::Removal).unwrap();
    assert_eq!((path.running(), device.join()), (vec![], 2));
    assert_eq!((read(&mut device, Place::Vf(1), 0x10), read_config(&device, rid(1), 4)), (u32::MAX, u32::MAX));
    let status = device.function_status(vf_1).unwrap();
    assert_eq!((status.exists, status.removed, status.reset_by), (false, true, ResetBy::Removal));
    assert!(device.inject(vf_1, Fault::Removal).is_err());
    let _ = disable(&mut device);
    let _ = enable(&mut device, 2);
    assert!(device.function_status(vf_1).unwrap().exists);
}

#[test]
fn each_function_has_memory_of_its_own_behind_an_iommu() {
    let (mut device, _) = device(2);
    assert!(!device.nic().memory(Place::Vf(1)).unwrap().has_iommu());
    let iommu = Iommu::new(48);
    let mut asked = Vec::new();
    device.attach_iommu(|rid| {
        asked.push(rid);
        (rid != PF).then(|| iommu.add_endpoint(0, rid))
    });
    assert_eq!(asked, [PF, rid(0), rid(1)]);
    let memory = |place| device.nic().memory(place);
    assert!(!memory(Place::Pf).unwrap().has_iommu() && memory(Place::Vf(2)).is_none());
    let endpoints = [0, 1].map(|index| memory(Place::Vf(index)).unwrap().iommu().unwrap().clone());
    assert!(!Arc::ptr_eq(&endpoints[0], &endpoints[1]));
}
