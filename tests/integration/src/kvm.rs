//! Who may open `/dev/kvm`, for tests of users who may not.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;

const KVM: &str = "/dev/kvm";

/// A mode that `/dev/kvm` has until this is dropped.
pub struct KvmMode {
    before: Permissions,
}

impl KvmMode {
    /// Sets the permission bits of `/dev/kvm`.
    pub fn set(mode: u32) -> KvmMode {
        let before = fs::metadata(KVM).expect("/dev/kvm exists").permissions();
        fs::set_permissions(KVM, Permissions::from_mode(mode)).expect("the test runs as root");
        KvmMode { before }
    }
}

impl Drop for KvmMode {
    fn drop(&mut self) {
        let _ = fs::set_permissions(KVM, self.before.clone());
    }
}
