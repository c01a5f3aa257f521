//! Pauses and faults.

use super::*;
use crate::{Fault, FaultError};

#[test]
fn a_pause_stops_all_queues_and_accesses_still_work() {
    let (mut device, path) = enabled(4, 2);
    start(&mut device, Place::Vf(0));
    device.pause();
    assert_eq!((path.running(), device.join()), (vec![], 2));
    start(&mut device, Place::Vf(1));
    flr(&mut device, rid(0));
    assert_eq!(path.running(), []);
    device.resume();
    assert_eq!(path.running(), [(Direction::Receive, 2), (Direction::Transmit, 2)]);
    assert!(device.take_not_resumed().is_none());
}

#[test]
fn a_function_is_paused_without_the_others() {
    let (mut device, path) = enabled(4, 2);
    start(&mut device, Place::Vf(0));
    start(&mut device, Place::Vf(1));
    let outcome = device.pause_function(Some(VfIndex(0)));
    assert_eq!((outcome.reach, outcome.stopping.len()), (Reach::Function(rid(0)), 2));
    assert_eq!(path.running(), [(Direction::Receive, 2), (Direction::Transmit, 2)]);
    // A pause of all does not end it.
    device.pause();
    device.resume();
    assert_eq!(path.running().len(), 2);
    let _ = device.resume_function(Some(VfIndex(0)));
    assert_eq!(path.running().len(), 4);
    assert!(device.pause_function(Some(VfIndex(4))).is_none());
}

#[test]
fn a_device_that_cannot_resume_stays_paused() {
    let (mut device, path) = enabled(4, 2);
    start(&mut device, Place::Vf(0));
    device.pause();
    path.refuses.store(true, Ordering::Release);
    device.resume();
    let not_resumed = device.take_not_resumed().unwrap();
    assert_eq!((not_resumed.vf, not_resumed.error.to_string()), (None, "no threads left".to_string()));
    assert!(device.take_not_resumed().is_none() && path.running().is_empty());
    assert!(!device.nic().may_run(Place::Vf(0)));
    path.refuses.store(false, Ordering::Release);
    device.resume();
    assert_eq!(path.running().len(), 2);
}

#[test]
fn a_pf_refuses_to_enable_vfs_as_often_as_asked() {
    let (mut device, _) = device(4);
    device.inject(None, Fault::RefuseVfEnable { count: 1 }).unwrap();
    assert!(enable(&mut device, 2).refused.is_some());
    assert_eq!(device.functions.num_visible(), 0);
    let _ = enable(&mut device, 2);
    assert_eq!(device.functions.num_visible(), 2);
}

#[test]
fn faults_that_a_function_cannot_have_are_refused() {
    let (mut device, _) = enabled(4, 2);
    let (vf_0, vf_3) = (Some(VfIndex(0)), Some(VfIndex(3)));
    let refuse = Fault::RefuseVfEnable { count: 1 };
    for (vf, fault, expected) in [
        (None, Fault::NeedsReset, FaultError::NotVirtio),
        (vf_0, Fault::NeedsReset, FaultError::NotVirtio),
        (vf_0, refuse.clone(), FaultError::NotPf),
        (None, Fault::Removal, FaultError::NoVf),
        (vf_3, Fault::Removal, FaultError::NoVf),
    ] {
        assert_eq!(device.inject(vf, fault.clone()), Err(expected), "{vf:?} {fault:?}");
    }
    let (mut alone, _) = super::device(0);
    assert_eq!(alone.inject(None, refuse), Err(FaultError::NotPf));
}
