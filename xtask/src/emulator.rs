//! The emulator of a machine whose clock counts instructions: the machine's own QEMU, without a fault of its.
//!
//! When VMRUN is to inject an external interrupt, `helper_vmrun` of QEMU's `target/i386/tcg/sysemu/svm_helper.c` delivers it at once, and
//! leaves its vector in `exception_index`. If nothing else sets that before the processor's loop is next left, the interrupt is
//! delivered a second time, even where the guest has interrupts off: one that holds a spin lock then waits for it for ever. The
//! loop is left whenever a timer is due, if the clock counts instructions, and every second measurement ended so. With a clock
//! of its own the machine has not been seen to leave it there.

use std::fs;
use std::ops::Range;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::apt;
use crate::error::{Context, Error, Result};
use crate::lab::Lab;
use crate::progress::note;

/// QEMU's name, as Debian has it.
pub const PROGRAM: &str = "qemu-system-x86_64";
/// What sets `exception_index`, `exception_is_int` to 0 and `exception_next_eip` to -1 in that place only, the first of them from a
/// register, as bytes of x86-64's machine code. `..` is any byte: the distances of fields differ between versions.
const FAULT: &str = "89 b3 .. .. ff ff c7 83 .. .. 00 00 00 00 00 00 48 c7 83 .. .. 00 00 ff ff ff ff";
/// What takes the place of the first: an instruction as long that does nothing.
const NOTHING: [u8; 6] = [0x66, 0x0f, 0x1f, 0x44, 0x00, 0x00];

/// The command that runs it, made anew from the machine's QEMU each time. A QEMU whose code looks otherwise runs as it is, with a line that says so.
pub fn command(lab: &Lab) -> Result<Command> {
    let program = apt::find_program(PROGRAM).ok_or_else(|| Error::new(format!("{PROGRAM} is not in PATH")))?;
    let mut image = fs::read(&program).context(program.display())?;
    let Some(place) = only_match(&image, FAULT) else {
        note(
            "emulator",
            format!("{} has no known fault to take out: it may stand still now and then", program.display()),
        );
        return Ok(Command::new(program));
    };
    let fault = place.start..place.start + NOTHING.len();
    image[fault].copy_from_slice(&NOTHING);
    install(&lab.folder().join("emulator"), &program, &image).map(Command::new)
}

/// Makes `image` a program below `folder`, in place of `program`. QEMU looks for its modules and firmware from where it is itself.
fn install(folder: &Path, program: &Path, image: &[u8]) -> Result<PathBuf> {
    let bin = folder.join("bin");
    let (target, new) = (bin.join(PROGRAM), bin.join(format!("new-{}", std::process::id())));
    fs::create_dir_all(&bin).context(bin.display())?;
    for name in ["lib", "share"] {
        let (link, place) = (folder.join(name), program.parent().unwrap_or(program).join("..").join(name));
        if fs::symlink_metadata(&link).is_err() {
            symlink(&place, &link).context(link.display())?;
        }
    }
    // One that runs keeps the file that it was started from.
    fs::write(&new, image).context(new.display())?;
    fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).context(new.display())?;
    fs::rename(&new, &target).context(target.display())?;
    Ok(target)
}

/// Where in `image` the bytes of `pattern` are. None if they are nowhere, or in several places.
fn only_match(image: &[u8], pattern: &str) -> Option<Range<usize>> {
    let pattern: Vec<Option<u8>> = pattern.split(' ').map(|byte| u8::from_str_radix(byte, 16).ok()).collect();
    let fits =
        |bytes: &[u8]| pattern.iter().zip(bytes).all(|(wanted, byte)| wanted.is_none_or(|wanted| wanted == *byte));
    let mut found = image.windows(pattern.len()).enumerate().filter(|(_, bytes)| fits(bytes));
    let (first, _) = found.next()?;
    if found.next().is_some() { None } else { Some(first..first + pattern.len()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CODE: [u8; 27] = [
        0x89, 0xb3, 0x54, 0xef, 0xff, 0xff, 0xc7, 0x83, 0x84, 0x33, 0, 0, 0, 0, 0, 0, 0x48, 0xc7, 0x83, 0x88, 0x33, 0,
        0, 0xff, 0xff, 0xff, 0xff,
    ];

    #[test]
    fn the_fault_is_found_where_it_is_once() {
        let once = [&[0x90; 3][..], &CODE, &[0x90; 3]].concat();
        assert_eq!(only_match(&once, FAULT), Some(3..30));
    }

    #[test]
    fn what_is_there_twice_or_not_at_all_is_left_alone() {
        assert_eq!(only_match(&[CODE, CODE].concat(), FAULT), None);
        assert_eq!(only_match(&CODE[..26], FAULT), None);
        assert_eq!(only_match(&[0x90; 64], FAULT), None);
    }

    #[test]
    fn what_takes_its_place_is_as_long_as_the_first_instruction() {
        let second = FAULT.split(' ').position(|byte| byte == "c7").unwrap();
        assert_eq!(second, NOTHING.len());
    }
}
