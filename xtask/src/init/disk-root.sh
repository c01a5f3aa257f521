#!/bin/sh
# The init of a guest whose root file system is on a disk, `root=` of its command line: loads drivers of the disk, of the file
# system of cloud-init's disk, and of the channel by which a guest governs its VFs, and gives way to the init there.

export PATH=/bin
mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
for module in /modules/* /extra/virtio_blk/* /extra/isofs/* /extra/virtio_console/*; do
    [ ! -e "$module" ] || insmod "$module" || echo "cannot load $module"
done
disk=$(sed -n 's/.*root=\([^ ]*\).*/\1/p' /proc/cmdline)
waited=0
until [ -b "$disk" ] || [ $waited -eq 500 ]; do
    usleep 20000
    waited=$((waited + 1))
done
mkdir /disk
mount -t ext4 "$disk" /disk || poweroff -f
for tree in dev proc sys; do
    mount --move /$tree /disk/$tree
done
exec switch_root /disk /sbin/init
