//! The rules for the parts of a VM that are not devices of bus 0.

use crate::config::socket;
use crate::config::subject::Subject;
use vm_api::config::console::{ConsoleConfig, ConsoleMode};
use vm_api::config::error::{ConfigError, Problem};
use vm_api::config::option::Options as _;
use vm_api::config::{LandlockConfig, PayloadConfig, VmConfig};

use crate::config::memory::check_memory;
use crate::config::{cpus, debug_console};

/// Checks the parts.
///
/// # Errors
///
/// Fails with the first mistake.
pub(crate) fn check(vm: &VmConfig) -> Result<(), ConfigError> {
    cpus::check(&vm.cpus)?;
    check_memory(&vm.memory)?;
    check_payload(&vm.payload)?;
    if let Some(tpm) = &vm.tpm {
        socket::check(&tpm.socket, &Subject::device("--tpm", None, 0, 1))?;
    }
    check_path("--serial", &vm.serial)?;
    check_serial(&vm.serial)?;
    check_console(&vm.console, &vm.serial)?;
    debug_console::check(vm)?;
    check_landlock(vm)
}

/// Warnings about settings that are accepted and have no effect.
pub(crate) fn warnings(vm: &VmConfig) -> Vec<String> {
    let unused = vm.landlock_rules.iter().filter(|_| !vm.landlock_enable);
    let line = |rule| format!("{} {rule}: has no effect without --landlock (landlock_enable)", LandlockConfig::OPTION);
    unused.map(line).chain(lost_output(vm)).collect()
}

/// The warning about a kernel that writes to a serial port with no output. Nothing of it would be seen.
fn lost_output(vm: &VmConfig) -> Option<String> {
    let has_no_output = matches!(vm.serial.mode, ConsoleMode::Null | ConsoleMode::Off);
    let is_serial = |word: &str| word == "console=ttyS0" || word.starts_with("console=ttyS0,");
    let is_lost =
        has_no_output && vm.payload.cmdline.as_ref().is_some_and(|text| text.split_whitespace().any(is_serial));
    let serial = if vm.serial.mode == ConsoleMode::Off { "off" } else { "null" };
    is_lost.then(|| {
        format!("--cmdline console=ttyS0: the output is lost with --serial {serial}; give --serial tty --console off")
    })
}

fn check_landlock(vm: &VmConfig) -> Result<(), ConfigError> {
    let Some(rule) = vm.landlock_rules.iter().find(|rule| rule.path.as_os_str().is_empty()) else { return Ok(()) };
    let what = "the path is empty; give a file or a folder".to_string();
    Err(ConfigError::new(format!("{} {rule}", LandlockConfig::OPTION), Problem::Value(what)))
}

fn check_payload(payload: &PayloadConfig) -> Result<(), ConfigError> {
    if let (Some(firmware), Some(kernel)) = (&payload.firmware, &payload.kernel) {
        let what = format!("a VM boots either firmware or a kernel (--kernel {}); leave one out", kernel.display());
        return Err(ConfigError::new(format!("--firmware {}", firmware.display()), Problem::Conflict(what)));
    }
    if let Some(cmdline) = payload.cmdline.as_ref().filter(|cmdline| cmdline.contains('\0')) {
        let what = "a kernel command line ends at a NUL character; remove it".to_string();
        return Err(ConfigError::new(format!("--cmdline {cmdline}"), Problem::Value(what)));
    }
    Ok(())
}

/// Checks the serial port, which is not a PCI device.
fn check_serial(serial: &ConsoleConfig) -> Result<(), ConfigError> {
    let ConsoleConfig { id, pci_segment, pci_device_id, iommu, .. } = serial;
    let settings = [
        ("id", id.is_some()),
        ("pci_segment", *pci_segment != 0),
        ("pci_device_id", pci_device_id.is_some()),
        ("iommu", *iommu),
    ];
    match settings.iter().find(|(_, given)| *given) {
        Some((key, _)) => {
            let what = format!("the serial port is not a PCI device; leave {key} out");
            Err(ConfigError::new(format!("--serial {serial}"), Problem::Conflict(what)))
        }
        None => Ok(()),
    }
}

/// Checks the virtio console of a VM with this serial port: they must not share a file or a socket. They may share the
/// terminal, as in Cloud Hypervisor, where that is what `--serial tty` alone does.
fn check_console(console: &ConsoleConfig, serial: &ConsoleConfig) -> Result<(), ConfigError> {
    check_path("--console", console)?;
    if console.mode != serial.mode {
        return Ok(());
    }
    // Writing to a device such as /dev/null overwrites nothing.
    let is_device = console.file.as_ref().is_some_and(|path| path.starts_with("/dev"));
    let shared = match console.mode {
        ConsoleMode::File if console.file == serial.file && !is_device => "file",
        ConsoleMode::Socket if console.socket == serial.socket => "socket",
        _ => return Ok(()),
    };
    let what = format!("the serial port has this {shared} (--serial {serial}); give one of them another path");
    Err(ConfigError::new(format!("--console {console}"), Problem::Conflict(what)))
}

/// Checks that a path is given if the mode needs one, and only then.
fn check_path(option: &str, console: &ConsoleConfig) -> Result<(), ConfigError> {
    if [&console.file, &console.socket].into_iter().flatten().any(|path| path.as_os_str().is_empty()) {
        let what = "the path is empty; give one".to_string();
        return Err(ConfigError::new(format!("{option} {console}"), Problem::Value(what)));
    }
    let needed = (console.mode == ConsoleMode::File, console.mode == ConsoleMode::Socket);
    if console.mode == ConsoleMode::Pty && console.socket.is_none() {
        // The path that vm.info reported for the previous pseudo-terminal. The VM gets another one.
        return Ok(());
    }
    let fail = |what: &str| Err(ConfigError::new(format!("{option} {console}"), Problem::Conflict(what.to_string())));
    match (console.file.is_some(), console.socket.is_some()) {
        given if given == needed => Ok(()),
        (false, _) if needed.0 => fail("mode File needs a file; give one"),
        (_, false) if needed.1 => fail("mode Socket needs a socket; give one"),
        (true, _) if !needed.0 => fail("only mode File has a file; leave file out"),
        _ => fail("only mode Socket has a socket; leave socket out"),
    }
}
