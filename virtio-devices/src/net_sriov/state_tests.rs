//! Pauses and saved state of a PF with VFs.

use super::*;

#[test]
fn a_pause_holds_for_vfs_that_are_enabled_during_it() {
    let mut device = threaded();
    let _ = enable(&mut device, 2);
    pf(&mut device).init();
    vf(&mut device, 1).init();
    device.pause();
    assert_eq!(join(&mut device), 2);
    assert!(running(&device).is_empty() && !device.pf().is_running());
    let _ = disable(&mut device);
    let _ = enable(&mut device, 3);
    assert_eq!(vf(&mut device, 2).init(), 15);
    assert!(running(&device).is_empty());
    device.resume();
    assert_eq!(running(&device), [2]);
    assert!(device.pf().is_running());
    let _ = device.reset(ResetKind::Conventional);
    assert_eq!(join(&mut device), 2);
}

#[test]
fn vfs_of_a_pf_in_d3hot_stand_still_after_a_pause() {
    let mut device = idle();
    let _ = enable(&mut device, 1);
    vf(&mut device, 0).init();
    device.pause();
    let power = pf(&mut device).capability(0x01, |_| true).unwrap();
    let _ = pf(&mut device).config_write(power + 4, 2, 3);
    device.resume();
    assert!(running(&device).is_empty());
    let _ = pf(&mut device).config_write(power + 4, 2, 0);
    assert_eq!(running(&device), [0]);
}
