//! A pseudo-terminal, to test the VMM's changes to the terminal in which it is started.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::Stdio;

use crate::vmm::{Vmm, VmmCommand};

/// A pseudo-terminal: the end that a program runs in, and the user's end.
pub struct Terminal {
    person: OwnedFd,
    program: OwnedFd,
}

/// A terminal's settings, for comparison.
#[derive(Debug, PartialEq, Eq)]
pub struct Settings {
    flags: [libc::tcflag_t; 4],
    characters: Vec<libc::cc_t>,
}

impl Terminal {
    /// Opens a pseudo-terminal with the kernel's default settings.
    #[expect(clippy::new_without_default, reason = "it opens a device")]
    pub fn new() -> Terminal {
        let (mut person, mut program) = (-1, -1);
        let null = std::ptr::null_mut();
        // SAFETY: openpty writes both numbers, and accepts null for the rest.
        let done = unsafe { libc::openpty(&mut person, &mut program, null, null.cast(), null.cast()) };
        assert_eq!(done, 0, "opening a pseudo-terminal: {}", std::io::Error::last_os_error());
        // SAFETY: both descriptors were just opened and have no other owner.
        unsafe { Terminal { person: OwnedFd::from_raw_fd(person), program: OwnedFd::from_raw_fd(program) } }
    }

    /// Current settings.
    pub fn settings(&self) -> Settings {
        // SAFETY: termios is plain data for which zero is valid, and tcgetattr fills it.
        let termios = unsafe {
            let mut termios: libc::termios = std::mem::zeroed();
            assert_eq!(libc::tcgetattr(self.program.as_raw_fd(), &mut termios), 0);
            termios
        };
        Settings {
            flags: [termios.c_iflag, termios.c_oflag, termios.c_cflag, termios.c_lflag],
            characters: termios.c_cc.to_vec(),
        }
    }

    /// True if input is line-edited before a program gets it, as in a shell.
    pub fn is_canonical(&self) -> bool {
        self.settings().flags[3] & libc::ICANON != 0
    }

    /// Sets its size in characters. No program is notified: it is not a controlling terminal.
    pub fn set_size(&self, columns: u16, rows: u16) {
        let size = libc::winsize { ws_col: columns, ws_row: rows, ws_xpixel: 0, ws_ypixel: 0 };
        // SAFETY: the call only reads the size, which outlives it.
        assert_eq!(unsafe { libc::ioctl(self.person.as_raw_fd(), libc::TIOCSWINSZ, &size) }, 0);
    }

    /// Starts a VMM in this terminal.
    pub fn spawn(&self, mut command: VmmCommand) -> Vmm {
        command.stdio(|| Stdio::from(self.program.try_clone().expect("a descriptor can be duplicated")));
        command.spawn_as_it_is()
    }

    /// Reads what the program prints until `text` appears. Panics after about 60 s.
    pub fn wait_for(&self, text: &str) {
        let mut seen = String::new();
        for _ in 0..600 {
            let mut poll = libc::pollfd { fd: self.person.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: the array has one pollfd, as given.
            if unsafe { libc::poll(&mut poll, 1, 100) } == 0 {
                continue;
            }
            let mut buffer = [0_u8; 4096];
            // SAFETY: the buffer has the given length.
            let length = unsafe { libc::read(self.person.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len()) };
            seen += &String::from_utf8_lossy(&buffer[..usize::try_from(length).unwrap_or(0)]);
            if seen.contains(text) {
                return;
            }
        }
        panic!("the terminal never showed {text:?}; it showed:\n{seen}");
    }

    /// Types `text`.
    pub fn send(&self, text: &str) {
        // SAFETY: the buffer has the given length.
        let written = unsafe { libc::write(self.person.as_raw_fd(), text.as_ptr().cast(), text.len()) };
        assert_eq!(written, text.len() as isize, "the terminal accepts all that is typed");
    }
}
