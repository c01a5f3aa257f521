//! Resuming on a host that lacks resources.

use std::time::Instant;

use super::*;

#[test]
fn a_resource_that_the_host_lacks_briefly_is_waited_for() {
    let Rig { wants, slot, .. } = rig();
    wants.lock().refusals = 5;
    slot.pause();
    slot.resume().unwrap();
    assert_eq!(wants.lock().refusals, 0);
}

#[test]
fn resume_fails_only_if_the_host_lacks_resources_for_long() {
    let Rig { wants, slot, .. } = rig();
    wants.lock().refusals = usize::MAX;
    slot.pause();
    let began = Instant::now();
    let NotResumed { vf, error } = slot.resume().unwrap_err();
    assert_eq!((vf, error.raw_os_error()), (Some(VfIndex(3)), Some(libc::EMFILE)));
    assert!(began.elapsed() >= Duration::from_secs(1), "other clients wait for it, so not for much longer");
    let tries = usize::MAX - wants.lock().refusals;
    assert_eq!(tries, 8);
    wants.lock().refusals = 0;
    slot.resume().unwrap();
}
