//! A block device of this machine over a file, with blocks of a given size.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use crate::host_nic::load_modules;

/// `linux/loop.h`.
const LOOP_SET_FD: libc::c_ulong = 0x4c00;
const LOOP_CLR_FD: libc::c_ulong = 0x4c01;
const LOOP_SET_BLOCK_SIZE: libc::c_ulong = 0x4c09;
const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4c82;

/// Attempts to get a device that another program has not taken in the meantime.
const ATTEMPTS: usize = 100;

/// A loop device. The file is released when this is dropped and the last program has closed the device.
pub struct LoopDevice {
    device: File,
    path: PathBuf,
}

impl LoopDevice {
    /// A device over `file` with blocks of `block_size` bytes, such as 4096 for a disk that is called 4Kn.
    pub fn new(file: &Path, block_size: u32) -> LoopDevice {
        if !Path::new("/dev/loop-control").exists() {
            load_modules(&["loop"]);
        }
        let control = open(Path::new("/dev/loop-control"));
        let file = open(file);
        for _ in 0..ATTEMPTS {
            let number = ioctl(&control, LOOP_CTL_GET_FREE, 0).expect("a free loop device");
            let path = PathBuf::from(format!("/dev/loop{number}"));
            let device = open(&path);
            if ioctl(&device, LOOP_SET_FD, file.as_raw_fd().cast_unsigned().into()).is_ok() {
                let made = LoopDevice { device, path };
                ioctl(&made.device, LOOP_SET_BLOCK_SIZE, block_size.into()).expect("the size of blocks");
                return made;
            }
        }
        panic!("each free loop device was taken by another program");
    }

    /// The path of the device.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = ioctl(&self.device, LOOP_CLR_FD, 0);
    }
}

fn open(path: &Path) -> File {
    let file = OpenOptions::new().read(true).write(true).open(path);
    file.unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn ioctl(file: &File, request: libc::c_ulong, argument: libc::c_ulong) -> std::io::Result<i32> {
    // SAFETY: these requests take a number, and no memory.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), request, argument) };
    if result < 0 { Err(std::io::Error::last_os_error()) } else { Ok(result) }
}
