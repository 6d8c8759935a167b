package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"go.yaml.in/yaml/v3"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/config"
	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/mappings"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/private"
)

// persistFile is the configuration file of a device that is mapped with
// --persist.
func persistFile(ctx context.Context, client controlpb.ClientDaemonClient, device string) (string, error) {
	info, err := client.Info(ctx, &controlpb.InfoRequest{})
	if err != nil {
		return "", err
	}
	if info.ConfigDir == "" {
		return "", usageError{errors.New("--persist: the client daemon has no folder for configuration files: start it with --config-dir")}
	}
	return filepath.Join(info.ConfigDir, device+".yaml"), nil
}

// persist records the mapping of dev in a file, so that the daemon makes it
// at each start. The file is replaced as a whole.
func persist(file string, inv *inventory, dev device, asked *controlpb.MapRequest) error {
	m := mappingOf(inv, dev)
	m.IOMode, m.Frontend, m.Loss = asked.IoMode, asked.Frontend, asked.Loss
	if asked.Session == "" {
		m.Session = "" // it was made up for this daemon
	}
	if len(asked.Paths) > 0 {
		m.Server = asked.Paths
	}
	text, err := yaml.Marshal(map[string][]mappings.Mapping{keyMappings: {m}})
	if err != nil {
		return err
	}
	head := fmt.Sprintf("written by \"rnbd map --persist\"; \"rnbd unmap %s --persist\" removes it.", dev.name)
	if err := private.Replace(file, config.Seal(head, text)); err != nil {
		err = fmt.Errorf("%s is mapped, and is not written down: %w", dev.name, err)
		return hinted{err, "it stays mapped until the daemon ends; repair the folder, then unmap and map it again, or put what `rnbd config export` says of it into a file there"}
	}
	return nil
}

// forget removes the file of a device that was unmapped with --persist.
func forget(file string) error {
	if _, err := os.Lstat(file); errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("no mapping is written down: %w", err)
	}
	return private.Remove(file)
}
