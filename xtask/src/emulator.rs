//! The emulator of machines whose clock counts instructions: a copy of this machine's QEMU with one bug patched.
//!
//! When VMRUN injects an external interrupt, `helper_vmrun` in QEMU's `target/i386/tcg/sysemu/svm_helper.c` delivers it
//! at once, but leaves its vector in `exception_index`. If nothing else sets that before the CPU loop next exits, the
//! interrupt is delivered a second time, even while the guest has interrupts disabled. A guest that holds a spin lock
//! then deadlocks. If the clock counts instructions, the loop exits whenever a timer is due, and every second
//! measurement hung. With a real clock this was never seen.

use std::fs;
use std::ops::Range;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use parking_lot::Mutex;

use crate::apt;
use crate::error::{Context, Error, Result};
use crate::lab::Lab;
use crate::progress::note;

/// QEMU's name in Debian.
pub(crate) const PROGRAM: &str = "qemu-system-x86_64";
/// The x86-64 machine code, found only there, that sets `exception_index` from a register, `exception_is_int` to 0 and
/// `exception_next_eip` to -1. `..` is any byte: the offsets of fields differ between versions.
const FAULT: &str = "89 b3 .. .. ff ff c7 83 .. .. 00 00 00 00 00 00 48 c7 83 .. .. 00 00 ff ff ff ff";
/// What replaces the first instruction: a NOP of the same length.
const NOTHING: [u8; 6] = [0x66, 0x0f, 0x1f, 0x44, 0x00, 0x00];

/// Held while the copy is looked at and written, as workers boot their machines side by side.
static COPY: Mutex<()> = Mutex::new(());

/// The command that runs the patched copy, which is written if it is not there. A QEMU without that code runs unpatched; a
/// line says so.
pub(crate) fn command(lab: &Lab) -> Result<Command> {
    let program = apt::find_program(PROGRAM).ok_or_else(|| Error::new(format!("{PROGRAM} is not in PATH")))?;
    let mut image = fs::read(&program).context(program.display())?;
    let Some(place) = only_match(&image, FAULT) else {
        note(
            "emulator",
            format!("{} is not the version that the patch is for; it runs unpatched and may hang", program.display()),
        );
        return Ok(Command::new(program));
    };
    let fault = place.start..place.start + NOTHING.len();
    image[fault].copy_from_slice(&NOTHING);
    install(&lab.folder().join("emulator"), &program, &image).map(Command::new)
}

/// Writes `image` below `folder` as a replacement of `program`. QEMU finds its modules and firmware relative to its own
/// path.
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
    let _held = COPY.lock();
    if fs::read(&target).is_ok_and(|have| have == image) {
        return Ok(target);
    }
    // A running copy keeps its old file.
    fs::write(&new, image).context(new.display())?;
    fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).context(new.display())?;
    fs::rename(&new, &target).context(target.display())?;
    Ok(target)
}

/// Where `pattern` is in `image`. `None` if it is nowhere or in several places.
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
