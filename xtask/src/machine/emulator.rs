//! The emulators of first-level machines: copies of QEMU with one bug patched, in this machine's 7.2 and in Debian's
//! newest, 11.1.
//!
//! QEMU delivers an external interrupt that VMRUN injects at once, in `helper_vmrun` of
//! `target/i386/tcg/sysemu/svm_helper.c` (later `system`), but leaves its vector in `exception_index`. If nothing else
//! sets that before the CPU loop next exits, the interrupt is delivered a second time, even while the guest has
//! interrupts disabled. A guest that holds a spin lock or writes the time then deadlocks. If the clock counts
//! instructions, the loop exits whenever a timer is due, and every second measurement hung.
//!
//! With a real clock this requires a race: another thread requests an interrupt after the loop has checked for
//! interrupts and before it checks for exit requests. The tests of VFs with an igb of 11.1 failed this way in 2 of 36
//! runs. In one, a counter in the loop showed a second delivery of the guest's timer interrupt (vector 236), and Linux
//! warned of a broken timer. In the other the guest hung: its timer interrupt waited in `ktime_get_update_offsets_now`,
//! with interrupts disabled, for a writer of the time that it had interrupted itself. With six PAUSEs between the two
//! checks, the third guest hung: KVM had injected its timer interrupt once, the guest had written EOI twice, and its
//! backtrace had the second interrupt in code with interrupts disabled.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, io};

use parking_lot::Mutex;

use crate::error::{Context, Error, Result};
use crate::fetch::apt;
use crate::lab::Lab;
use crate::progress::note;

/// QEMU's name in Debian.
pub(crate) const PROGRAM: &str = "qemu-system-x86_64";
/// The x86-64 machine code, found only there, that sets `exception_index` from a register, `exception_is_int` to 0 and
/// `exception_next_eip` to -1. `..` is any byte: the offsets of fields differ between versions. 7.2 and 11.1 have it.
const FAULT: &str = "89 b3 .. .. ff ff c7 83 .. .. 00 00 00 00 00 00 48 c7 83 .. .. 00 00 ff ff ff ff";
/// Replacement for the first instruction: a NOP of the same length.
const NOTHING: [u8; 6] = [0x66, 0x0f, 0x1f, 0x44, 0x00, 0x00];
/// Programs, and their copies. Locked while a copy is written: workers start machines at the same time.
static COPIES: Mutex<BTreeMap<PathBuf, PathBuf>> = Mutex::new(BTreeMap::new());

/// The command that runs the patched copy of this machine's QEMU. A QEMU without that code runs unpatched, after a
/// message.
pub(crate) fn command(lab: &Lab) -> Result<Command> {
    let program = apt::find_program(PROGRAM).ok_or_else(|| Error::new(format!("{PROGRAM} is not in PATH")))?;
    let folder = lab.folder().join("emulator");
    let bin = folder.join("bin");
    let copy = patched(&program, &bin)?;
    if copy != program {
        // QEMU finds its modules and firmware relative to its own path.
        for name in ["lib", "share"] {
            let (link, place) = (folder.join(name), program.parent().unwrap_or(&program).join("..").join(name));
            if let Err(error) = symlink(&place, &link)
                && error.kind() != io::ErrorKind::AlreadyExists
            {
                return Err(error).context(link.display());
            }
        }
    }
    Ok(Command::new(copy))
}

/// Writes a patched copy of `program` into `folder`, if it is missing, and returns its path. Without the code to patch,
/// prints a line and returns `program`.
pub(crate) fn patched(program: &Path, folder: &Path) -> Result<PathBuf> {
    let mut copies = COPIES.lock();
    if let Some(copy) = copies.get(program) {
        return Ok(copy.clone());
    }
    let copy = write_copy(program, folder)?;
    copies.insert(program.to_owned(), copy.clone());
    Ok(copy)
}

fn write_copy(program: &Path, folder: &Path) -> Result<PathBuf> {
    let mut image = fs::read(program).context(program.display())?;
    let Some(place) = only_match(&image, FAULT) else {
        note(
            "emulator",
            format!("{} is not the version that the patch is for; it runs unpatched and may hang", program.display()),
        );
        return Ok(program.to_owned());
    };
    let fault = place.start..place.start + NOTHING.len();
    image[fault].copy_from_slice(&NOTHING);
    let (target, new) = (folder.join(PROGRAM), folder.join(format!("new-{}", std::process::id())));
    if fs::read(&target).is_ok_and(|there| there == image) {
        return Ok(target);
    }
    fs::create_dir_all(folder).context(folder.display())?;
    // A running copy keeps its old file.
    fs::write(&new, image).context(new.display())?;
    fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).context(new.display())?;
    fs::rename(&new, &target).context(target.display())?;
    Ok(target)
}

/// Place of `pattern` in `image`. `None` if there is none or more than one.
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

    /// Code of QEMU 11.1.3 at that place, as opposed to 7.2.
    const NEWER: [u8; 27] = [
        0x89, 0xb3, 0x50, 0xc2, 0xff, 0xff, 0xc7, 0x83, 0x84, 0x34, 0, 0, 0, 0, 0, 0, 0x48, 0xc7, 0x83, 0x88, 0x34, 0,
        0, 0xff, 0xff, 0xff, 0xff,
    ];

    #[test]
    fn a_copy_lacks_the_first_instruction_of_the_fault() {
        let folder = tempfile::tempdir().unwrap();
        let (program, bin) = (folder.path().join("original"), folder.path().join("bin"));
        for code in [CODE, NEWER] {
            fs::write(&program, [&[0x90; 3][..], &code, &[0x90; 3]].concat()).unwrap();
            let copy = write_copy(&program, &bin).unwrap();
            let expected = [&[0x90; 3][..], &NOTHING, &code[NOTHING.len()..], &[0x90; 3]].concat();
            assert_eq!(fs::read(&copy).unwrap(), expected);
            assert_eq!(fs::metadata(&copy).unwrap().permissions().mode() & 0o777, 0o755);
        }
        fs::write(&program, [0x90; 64]).unwrap();
        assert_eq!(write_copy(&program, &bin).unwrap(), program);
    }

    #[test]
    fn an_instruction_found_twice_or_never_is_left_alone() {
        assert_eq!(only_match(&[CODE, CODE].concat(), FAULT), None);
        assert_eq!(only_match(&CODE[..26], FAULT), None);
        assert_eq!(only_match(&[0x90; 64], FAULT), None);
    }

    #[test]
    fn the_replacement_is_as_long_as_the_first_instruction() {
        let second = FAULT.split(' ').position(|byte| byte == "c7").unwrap();
        assert_eq!(second, NOTHING.len());
    }
}
