//! The rules for the debug console.

use vm_api::config::error::{ConfigError, Problem};
use vm_api::config::{ConsoleMode, DebugConsoleConfig, VmConfig};

use crate::arch::x86_64::layout;

/// Checks the debug console.
///
/// # Errors
///
/// Fails with the first mistake.
pub(crate) fn check(vm: &VmConfig) -> Result<(), ConfigError> {
    let console = &vm.debug_console;
    let DebugConsoleConfig { mode, file, iobase } = console;
    let fail = |problem| Err(ConfigError::new(format!("--debug-console {console}"), problem));
    if file.as_ref().is_some_and(|path| path.as_os_str().is_empty()) {
        return fail(Problem::Value("the path is empty; give one".to_string()));
    }
    match (mode, file) {
        (ConsoleMode::Off, None) => return Ok(()),
        (ConsoleMode::Socket, _) => {
            return fail(Problem::Value("it cannot be a socket; give Pty, or a File".to_string()));
        }
        (ConsoleMode::File, None) => return fail(Problem::Conflict("mode File needs a file; give one".to_string())),
        // The path that vm.info reported for the previous pseudo-terminal. The VM gets another one.
        (ConsoleMode::File | ConsoleMode::Pty, _) | (_, None) => {}
        _ => return fail(Problem::Conflict("only mode File has a file; leave file out".to_string())),
    }
    if *iobase == u16::MAX {
        let what = "the last port cannot be used; give another, such as 0xe9".to_string();
        return fail(Problem::Limit(what));
    }
    if layout::is_device_port(*iobase) {
        let what = format!("port {iobase:#x} is of another device of the VM; give another, such as 0xe9");
        return fail(Problem::Conflict(what));
    }
    for (option, other) in [("--serial", &vm.serial), ("--console", &vm.console)] {
        let is_same = *mode == ConsoleMode::File && other.mode == ConsoleMode::File && *file == other.file;
        // Writing to a device such as /dev/null overwrites nothing.
        if is_same && !file.as_ref().is_some_and(|path| path.starts_with("/dev")) {
            let what = format!("{option} has this file, too; give one of them another path");
            return fail(Problem::Conflict(what));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{ConsoleConfig, PlannedVm};

    fn planned(console: DebugConsoleConfig) -> Result<(), String> {
        let serial = ConsoleConfig { file: Some("/tmp/a".into()), ..ConsoleConfig::new(ConsoleMode::File) };
        let vm = VmConfig { debug_console: console, serial, ..VmConfig::default() };
        PlannedVm::new(vm).map(drop).map_err(|error| error.to_string())
    }

    fn planned_text(text: &str) -> Result<(), String> {
        planned(text.parse().unwrap())
    }

    #[test]
    fn a_port_or_file_of_something_else_is_refused() {
        for fine in ["off,iobase=0x3f8", "pty", "null,iobase=0x402", "tty,iobase=0", "file=/tmp/b", "file=/dev/null"] {
            assert_eq!(planned_text(fine), Ok(()), "{fine}");
        }
        for port in [0x61, 0x64, 0x70, 0x3f8, 0x3ff, 0x600, 0x602, 0x608, 0x610, 0xa000, 0xb000, 0xb100, 0xcf8, 0xcff] {
            assert_eq!(
                planned_text(&format!("null,iobase={port}")),
                Err(format!(
                    "--debug-console null,iobase={port:#x}: port {port:#x} is of another device of the VM; give \
                     another, such as 0xe9"
                ))
            );
        }
        assert_eq!(
            planned_text("file=/tmp/a"),
            Err("--debug-console file=/tmp/a,iobase=0xe9: --serial has this file, too; give one of them another path"
                .to_string())
        );
    }

    #[test]
    fn a_mode_and_a_file_that_do_not_fit_are_refused() {
        let of = |mode, file: Option<&str>| {
            planned(DebugConsoleConfig { mode, file: file.map(Into::into), ..DebugConsoleConfig::default() })
        };
        // As vm.info prints it.
        assert_eq!(of(ConsoleMode::Pty, Some("/dev/pts/7")), Ok(()));
        for (mode, file) in [
            (ConsoleMode::File, None),
            (ConsoleMode::Null, Some("/f")),
            (ConsoleMode::Off, Some("/f")),
            (ConsoleMode::Socket, None),
        ] {
            assert!(of(mode, file).unwrap_err().starts_with("--debug-console "), "{mode:?}");
        }
    }
}
