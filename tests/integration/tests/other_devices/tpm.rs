//! A TPM 2.0 over Debian's swtpm.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use integration::{Guest, GuestSpec, Kernel};
use rstest::rstest;

/// Time that swtpm may take to listen.
const LIMIT: Duration = Duration::from_secs(60);

/// A swtpm, which is killed when this is dropped.
struct Swtpm(Child);

impl Drop for Swtpm {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn a_guest_finds_its_tpm_again_after_a_reboot(#[case] kernel: Kernel) {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let mut command = Command::new("swtpm");
    command.args(["socket", "--tpm2", "--tpmstate", &format!("dir={}", folder.path().display())]);
    command.args(["--ctrl", &format!("type=unixio,path={}", socket.display())]).stdin(Stdio::null());
    let _swtpm = Swtpm(command.spawn().expect("swtpm"));
    let start = Instant::now();
    while !socket.exists() {
        assert!(start.elapsed() < LIMIT, "swtpm does not listen");
        std::thread::sleep(Duration::from_millis(20));
    }
    let tpm = format!("socket={}", socket.display());
    let mut guest = Guest::boot(GuestSpec::new(kernel).arguments(&["--tpm", &tpm]));
    for _ in 0..2 {
        assert_eq!(guest.ok("cat /sys/class/tpm/tpm0/tpm_version_major"), "2");
        // This PCR has never been extended.
        assert_eq!(guest.ok("cat /sys/class/tpm/tpm0/pcr-sha256/16"), "0".repeat(64));
        guest.assert_kernel_has_no_complaint();
        guest.reboot();
    }
    assert_eq!(guest.power_off().code, Some(0));
}
