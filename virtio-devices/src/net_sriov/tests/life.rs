//! Enabling, reset, power states and disabling of VFs.

use super::*;
use crate::{Fault, FaultError, ResetBy, StoppedBy};

/// G24: VFs that were in use and are enabled again.
#[test]
fn vfs_that_are_enabled_again_are_fresh() {
    let mut device = threaded();
    let _ = enable(&mut device, 3);
    let fresh: Vec<_> = (0..3).map(|index| image(&mut device, index)).collect();
    for index in 0..3 {
        assert_eq!(vf(&mut device, index).init(), 15);
        set_up_msix(&mut device, index);
        let _ = vf(&mut device, index).bar_write(2, 0x200, 4, 7);
    }
    let effects = disable(&mut device);
    assert_eq!(effects.vfs, Some(VfChange::Disabled { num_vfs: 3 }));
    assert!(effects.windows && effects.messages && effects.queues);
    assert_eq!(join(&mut device), 3);
    assert!(running(&device).is_empty());
    let _ = enable(&mut device, 3);
    for (index, fresh) in (0..3).zip(&fresh) {
        assert_eq!(&image(&mut device, index), fresh, "VF {index}");
        assert_eq!(vf(&mut device, index).init(), 15);
    }
    let _ = disable(&mut device);
    join(&mut device);
}

/// G26: VFs in use while Control is written again and VF MSE changes.
#[test]
fn writing_control_again_and_toggling_mse_keeps_the_vfs() {
    let mut device = idle();
    let _ = enable(&mut device, 2);
    vf(&mut device, 0).init();
    for control in [9, 1, 9, 0xffff, 1] {
        let effects = pf(&mut device).config_write(SRIOV + 8, 2, control);
        assert_eq!(effects.vfs, None);
    }
    let _ = pf(&mut device).config_write(SRIOV + 8, 2, 9);
    assert_eq!(vf(&mut device, 0).status(), 15);
    assert_eq!(device.vf(VfIndex(0)).unwrap().device().starts, 1);
}

/// G37: function level reset of a VF among others.
#[test]
fn a_function_level_reset_of_a_vf_leaves_its_siblings_alone() {
    let mut device = threaded();
    let _ = enable(&mut device, 3);
    let fresh = image(&mut device, 1);
    pf(&mut device).init();
    (0..3).for_each(|index| assert_eq!(vf(&mut device, index).init(), 15));
    // A worker's first signals are pending bits of its function.
    (0..3).for_each(|index| wait_for_kick(&device, index));
    let siblings = [0, 2].map(|index| image(&mut device, index));
    let windows_before = windows(&device);
    let effects = vf(&mut device, 1).flr();
    assert_eq!((effects.vfs, effects.reset), (None, None));
    assert_eq!(join(&mut device), 1);
    assert_eq!(running(&device), [0, 2]);
    assert!(device.pf().is_running());
    assert_eq!(image(&mut device, 1), fresh);
    assert_eq!([0, 2].map(|index| image(&mut device, index)), siblings);
    assert_eq!(windows(&device), windows_before);
    assert_eq!(vf(&mut device, 1).init(), 15);
    let _ = device.reset(ResetKind::Conventional);
    assert_eq!(join(&mut device), 4);
}

/// G38, G39: resets of the PF by itself and with the system.
#[test]
fn a_reset_of_the_pf_takes_its_vfs_with_it() {
    for by_register in [false, true] {
        let mut device = threaded();
        let _ = enable(&mut device, 3);
        pf(&mut device).init();
        vf(&mut device, 0).init();
        vf(&mut device, 2).init();
        let effects = if by_register { pf(&mut device).flr() } else { device.reset(ResetKind::Conventional).effects };
        assert_eq!(effects.vfs, Some(VfChange::Disabled { num_vfs: 3 }));
        assert_eq!(join(&mut device), 3, "PF and two VFs ran");
        assert!(running(&device).is_empty() && !device.pf().is_running());
        assert!(windows(&device).is_empty());
        assert_eq!(device.sriov(), idle().sriov());
        let _ = enable(&mut device, 3);
        let mut fresh = idle();
        let _ = enable(&mut fresh, 3);
        for index in 0..3 {
            assert_eq!(image(&mut device, index), image(&mut fresh, index));
        }
    }
}

/// G40, G41: a driver's reset of the PF.
#[test]
fn a_virtio_reset_of_the_pf_leaves_the_vfs_running() {
    let mut device = idle();
    assert_eq!(pf(&mut device).init(), 15);
    let _ = enable(&mut device, 2);
    vf(&mut device, 1).init();
    let _ = pf(&mut device).set_status(0);
    assert_eq!((running(&device), device.functions.num_visible()), (vec![1], 2));
    assert_eq!(pf(&mut device).init(), 15);
    assert_eq!(vf(&mut device, 1).status(), 15);
    let _ = pf(&mut device).set_status(0);
    let _ = disable(&mut device);
    assert_eq!(enable(&mut device, 3).vfs, Some(VfChange::Enabled { num_vfs: 3 }));
}

/// G43: VFs while their PF is in D3hot.
#[test]
fn vfs_follow_the_power_state_of_their_pf_and_keep_their_state() {
    let mut device = idle();
    let _ = enable(&mut device, 2);
    vf(&mut device, 0).init();
    set_up_msix(&mut device, 0);
    let before = image(&mut device, 0);
    let power = pf(&mut device).capability(0x01, |_| true).unwrap();
    let _ = pf(&mut device).config_write(power + 4, 2, 3);
    assert!(running(&device).is_empty());
    let stopped_by = |device: &Nic| device.function_status(Some(VfIndex(0))).unwrap().stopped_by;
    assert_eq!(stopped_by(&device), Some(StoppedBy::PfD3hot));
    let mut messages = Vec::new();
    device.messages(Reach::Device, &mut messages);
    assert!(messages.is_empty() && windows(&device).is_empty());
    assert_eq!(vf(&mut device, 0).bar_read(2, 0x14, 1), 0xff);
    // A VF whose Bus Master is set again must not run while its PF is in D3hot.
    let _ = vf(&mut device, 0).set_bus_master(false);
    let _ = vf(&mut device, 0).set_bus_master(true);
    assert!(running(&device).is_empty());
    let _ = pf(&mut device).config_write(power + 4, 2, 0);
    assert_eq!(running(&device), [0]);
    assert_eq!(image(&mut device, 0), before);
}

/// B8: many times on and off.
#[test]
fn a_thousand_times_on_and_off_leaves_nothing_behind() {
    let mut device = threaded();
    for _ in 0..1000 {
        let _ = enable(&mut device, 2);
        vf(&mut device, 1).init();
        let _ = disable(&mut device);
        assert_eq!(join(&mut device), 1);
    }
    assert_eq!(device.vf(VfIndex(1)).unwrap().device().counters.workers.load(Ordering::Acquire), 0);
}

#[test]
fn a_vf_that_the_host_cannot_resume_stays_paused_and_is_named() {
    let mut device = threaded();
    let _ = enable(&mut device, 3);
    (0..3).for_each(|index| assert_eq!(vf(&mut device, index).init(), 15));
    device.pause();
    join(&mut device);
    device.vf_mut(VfIndex(1)).unwrap().device_mut().refuse = true;
    device.resume();
    assert_eq!(running(&device), [0, 2]);
    assert_eq!(device.take_not_resumed().map(|not_resumed| not_resumed.vf), Some(Some(VfIndex(1))));
    assert!(device.take_not_resumed().is_none());
    device.vf_mut(VfIndex(1)).unwrap().device_mut().refuse = false;
    device.resume();
    assert_eq!(running(&device), [0, 1, 2]);
    let _ = disable(&mut device);
    join(&mut device);
}

#[test]
fn a_fault_on_demand_is_in_its_vf_alone_and_ends_with_a_reset() {
    let mut device = threaded();
    let _ = enable(&mut device, 3);
    let of = |index| Some(VfIndex(index));
    assert_eq!(device.inject(of(1), Fault::NeedsReset), Err(FaultError::NoDriver));
    (0..3).for_each(|index| assert_eq!(vf(&mut device, index).init(), 15));
    device.inject(of(1), Fault::NeedsReset).unwrap();
    assert_eq!((vf(&mut device, 1).status(), running(&device)), (0x4f, vec![0, 2]));
    assert_eq!(vf(&mut device, 1).init(), 15);
    assert_eq!(running(&device), [0, 1, 2]);
    device.inject(of(0), Fault::Removal).unwrap();
    assert_eq!(running(&device), [1, 2]);
    let removed = device.function_status(of(0)).unwrap();
    assert_eq!((removed.exists, removed.removed, removed.reset_by), (false, true, ResetBy::Removal));
    let mut messages = Vec::new();
    device.messages(Reach::Device, &mut messages);
    assert!(messages.iter().all(|message| message.requester != vf_rid(0)));
    for (vf, fault, error) in [
        (of(0), Fault::Removal, FaultError::NoVf),
        (of(3), Fault::Removal, FaultError::NoVf),
        (of(9), Fault::NeedsReset, FaultError::NoVf),
        (of(1), Fault::RefuseVfEnable { count: 1 }, FaultError::NotPf),
    ] {
        assert_eq!(device.inject(vf, fault), Err(error));
    }
    let _ = disable(&mut device);
    let _ = enable(&mut device, 3);
    assert_eq!(vf(&mut device, 0).init(), 15);
    let _ = device.reset(ResetKind::Conventional);
    assert_eq!(join(&mut device), 5);
}

#[test]
fn the_disabling_of_vfs_names_the_driver_a_flr_or_the_host() {
    let mut device = idle();
    let by = |device: &Nic| device.sriov_status().unwrap().disabled_by;
    let _ = enable(&mut device, 2);
    let _ = disable(&mut device);
    assert_eq!(by(&device), ResetBy::Driver);
    let _ = enable(&mut device, 2);
    let _ = pf(&mut device).flr();
    assert_eq!(by(&device), ResetBy::Flr);
    let _ = enable(&mut device, 2);
    let _ = device.reset(ResetKind::Conventional);
    assert_eq!(by(&device), ResetBy::Conventional);
}

/// Settings of the guest for a VF last as long as this number stays.
#[test]
fn each_vf_counts_how_often_it_ceased_to_exist() {
    let mut device = idle();
    let count =
        |device: &Nic| [0, 1].map(|index| device.function_status(Some(VfIndex(index))).unwrap().conventional_resets);
    let _ = enable(&mut device, 2);
    let (start, ended) = (count(&device), |device: &Nic| device.vf(VfIndex(0)).unwrap().device().guest_settings_ended);
    // Its own driver, a function level reset and a repeated VF Enable end nothing.
    assert_eq!(vf(&mut device, 0).init(), 15);
    let _ = vf(&mut device, 0).flr();
    let _ = pf(&mut device).config_write(SRIOV + 8, 2, 0x9);
    assert_eq!((count(&device), ended(&device)), (start, 0));
    let _ = disable(&mut device);
    let _ = enable(&mut device, 1);
    assert_eq!((count(&device), ended(&device)), (start.map(|number| number + 1), 1), "in the write that disables");
    let _ = pf(&mut device).flr();
    assert_eq!(count(&device), [start[0] + 2, start[1] + 1]);
    let _ = enable(&mut device, 1);
    let _ = device.reset(ResetKind::Conventional);
    let _ = enable(&mut device, 1);
    device.inject(Some(VfIndex(0)), Fault::Removal).unwrap();
    assert_eq!((count(&device)[0], ended(&device)), (start[0] + 4, 4));
}
