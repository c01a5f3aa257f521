//! Starts another kernel from within a guest. With three arguments (kernel, initramfs and command line) it loads the
//! kernel; without any it starts the loaded one. Debian's tool for this needs Xen's libraries.

use std::env;
use std::error::Error;
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    match arguments.as_slice() {
        [] => start(),
        [kernel, initramfs, cmdline] => {
            load(&File::open(kernel)?, &File::open(initramfs)?, &CString::new(cmdline.as_str())?)
        }
        _ => Err("usage: kexec [KERNEL INITRAMFS CMDLINE]".into()),
    }
}

fn load(kernel: &File, initramfs: &File, cmdline: &CString) -> Result<(), Box<dyn Error>> {
    // SAFETY: kexec_file_load(2) takes two open files, the length of a string with its NUL, that string, and flags.
    let done = unsafe {
        libc::syscall(
            libc::SYS_kexec_file_load,
            kernel.as_raw_fd(),
            initramfs.as_raw_fd(),
            cmdline.as_bytes_with_nul().len(),
            cmdline.as_ptr(),
            0_u64,
        )
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error().into()) }
}

fn start() -> Result<(), Box<dyn Error>> {
    // SAFETY: reboot(2) does not return when it succeeds, and changes nothing when it fails.
    unsafe { libc::reboot(libc::LINUX_REBOOT_CMD_KEXEC) };
    Err(io::Error::last_os_error().into())
}
