//! Writes that the capability refuses are reported and change nothing.

use super::*;

fn refused(effects: Effects) -> Option<String> {
    assert!(effects.is_none(), "nothing follows from it: {effects:?}");
    effects.refused.map(|refused| {
        assert!(refused.to_string().starts_with(refused.register()));
        refused.to_string()
    })
}

/// G6: NumVFs above TotalVFs.
#[test]
fn vf_enable_with_too_many_vfs_is_refused_with_the_reason() {
    let mut sriov = sriov(8);
    assert!(refused(word(&mut sriov, NUM_VFS, 9)).is_none(), "NumVFs holds any value");
    let told = "VF Enable stays clear: NumVFs is 9, TotalVFs is 8";
    assert_eq!(refused(word(&mut sriov, CONTROL, 1)).unwrap(), told);
    let with_mse = word(&mut sriov, CONTROL, 9);
    assert_eq!((with_mse.windows, with_mse.refused.unwrap().to_string()), (true, told.to_string()), "VF MSE is taken");
    assert!(refused(word(&mut sriov, CONTROL, 8)).is_none());
}

/// G5: NumVFs while VFs exist.
#[test]
fn num_vfs_while_vfs_exist_is_refused_with_the_reason() {
    let mut sriov = enabled(8, 3);
    assert_eq!(refused(word(&mut sriov, NUM_VFS, 5)).unwrap(), "NumVFs cannot become 5 while VF Enable is set");
    assert!(refused(word(&mut sriov, NUM_VFS, 3)).is_none(), "it is 3");
    assert!(refused(write(&mut sriov, NUM_VFS, 0x00ff_0003)).is_none(), "what is read-only is not refused");
}

/// G7: System Page Size.
#[test]
fn page_sizes_that_do_not_exist_say_so() {
    let mut sriov = sriov(8);
    for size in [0, 2, 4, 0x11] {
        let expected = (size != 2).then(|| format!("System Page Size cannot become {size:#x}: not one supported size"));
        assert_eq!(refused(write(&mut sriov, PAGE_SIZE, size)), expected);
    }
    word(&mut sriov, CONTROL, 1);
    let told = "System Page Size cannot become 0x10 while VF Enable is set";
    assert_eq!(refused(write(&mut sriov, PAGE_SIZE, 0x10)).unwrap(), told);
    assert!(refused(write(&mut sriov, PAGE_SIZE, 2)).is_none(), "it is 2");
}

#[test]
fn of_two_refused_writes_the_later_one_is_reported() {
    let (first, second) = (Refused::NumVfs { written: 1 }, Refused::PowerState { written: 2 });
    let both = Effects::refused(first).and(Effects::WINDOWS).and(Effects::refused(second));
    assert_eq!((both.refused, both.windows, both.is_none()), (Some(second), true, false));
    assert_eq!(Effects::refused(first).and(Effects::NONE).refused, Some(first));
    assert_eq!(second.to_string(), "PowerState cannot become D2: only D0 and D3hot exist");
    let ari = "ARI Capable Hierarchy cannot change while VF Enable is set";
    assert_eq!(Refused::AriCapableHierarchy.to_string(), ari);
    let table = Refused::MsixTable { offset: 2, len: 2 }.to_string();
    assert_eq!(table, "the MSI-X table takes 4 or 8 bytes at a multiple of 4, and not 2 bytes at 0x2");
}

#[test]
fn a_failing_enable_leaves_no_trace_and_ends_by_itself() {
    let mut sriov = sriov(8);
    word(&mut sriov, NUM_VFS, 3);
    sriov.fail_enables(2);
    let told = "VF Enable stays clear: a fault that the host asked for";
    assert_eq!(refused(word(&mut sriov, CONTROL, 1)).unwrap(), told);
    let saved = sriov.save();
    assert_eq!((sriov.num_visible(), saved.control), (0, 0));
    // A state that is restored has no faults, and a reset keeps them.
    let mut restored = sriov.clone();
    restored.restore(&saved).unwrap();
    assert_eq!((word(&mut restored, CONTROL, 1).refused, restored.num_visible()), (None, 3));
    let _ = sriov.reset(ResetKind::Conventional);
    word(&mut sriov, NUM_VFS, 3);
    assert_eq!(refused(word(&mut sriov, CONTROL, 1)).unwrap(), told);
    assert_eq!((word(&mut sriov, CONTROL, 1).refused, sriov.num_visible()), (None, 3));
}
