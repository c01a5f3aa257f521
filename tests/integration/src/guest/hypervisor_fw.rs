//! Guests that Cloud Hypervisor's own firmware boots. It reads a kernel 512 bytes at a time, which takes some 20 s in
//! the nested lab.

use std::path::Path;
use std::time::Duration;

use crate::guest::{Guest, GuestSpec};
use crate::vmm::VmmCommand;

/// Time that the firmware and Linux may take, also under load, and if another process handles each read.
const BOOT_LIMIT: Duration = Duration::from_secs(600);
/// Text that the firmware prints before it reads the kernel, and after that.
const READS: &str = "Filesystem ready";
const DONE: &str = "Jumping to kernel";

impl GuestSpec {
    /// A guest whose firmware is `file`, given with `option` of the command line. Start it with
    /// [`Guest::start_by_firmware`].
    pub fn by_hypervisor_fw(option: &'static str, file: &Path) -> GuestSpec {
        GuestSpec::with_firmware(option, file)
    }
}

impl Guest {
    /// Starts a VMM whose guest firmware boots, and waits until the firmware reads the kernel.
    pub fn start_by_firmware(command: VmmCommand) -> Guest {
        let mut guest = Guest::restored_by(command);
        guest.wait_until_firmware_reads();
        guest
    }

    /// Waits until the firmware reads the kernel.
    pub fn wait_until_firmware_reads(&mut self) {
        self.wait_for_text_within(READS, BOOT_LIMIT);
    }

    /// True if the firmware has started Linux.
    pub fn has_left_firmware(&self) -> bool {
        self.transcript().contains(DONE)
    }

    /// Waits until the firmware has started Linux, and Linux its init.
    pub fn wait_for_linux(&mut self) {
        self.wait_for_text_within(DONE, BOOT_LIMIT);
        self.wait_until_ready_within(BOOT_LIMIT);
    }

    /// Reboots the guest from inside, and waits until the firmware has booted it again.
    pub fn reboot_by_firmware(&mut self) {
        self.send_last_command("reboot -f");
        self.wait_until_firmware_reads();
        self.wait_for_linux();
    }
}
