package mappings

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/rnbd-go/rnbd/modules/rnbd-client"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/names"
)

// Mapping is one mapping of the configuration. The values are those of the
// command "rnbd map".
type Mapping struct {
	Device   string            `yaml:"device"`             // name on the server
	Server   []string          `yaml:"server,omitempty"`   // paths: [SRC@]ADDRESS[:PORT][%FABRIC]
	Name     string            `yaml:"name,omitempty"`     // here; empty: rnbdN
	Session  string            `yaml:"session,omitempty"`  // empty: made from host and address
	Access   string            `yaml:"access,omitempty"`   // empty: rw
	Loss     string            `yaml:"loss,omitempty"`     // empty: the daemon's
	Frontend string            `yaml:"frontend,omitempty"` // empty: the daemon's
	IOMode   string            `yaml:"io-mode,omitempty"`  // empty: the server chooses
	Options  map[string]string `yaml:"options,omitempty"`  // of the front end
}

// Check returns an error of m, and the key where it stands.
func (m *Mapping) Check() (key string, err error) {
	switch {
	case m.Device == "":
		return "", errors.New("a mapping needs a device: its name on the server")
	case len(m.Server) == 0 && m.Session == "":
		return "", errors.New("a mapping needs a server, a list of addresses, or the session of another mapping")
	case client.IsReservedName(m.Name):
		return "name", fmt.Errorf("name %q: commands take the word for another thing", m.Name)
	case strings.ContainsAny(m.Name, "/\x00"):
		return "name", fmt.Errorf("name %q: a device name has no slash", m.Name)
	}
	for _, s := range m.Server {
		if err := client.CheckPath(s); err != nil {
			return "server", err
		}
	}
	if _, ok := blk.ParseAccessMode(m.access()); !ok {
		return "access", fmt.Errorf("access %q: use ro, rw or migration", m.Access)
	}
	if _, err := client.ParseLoss(m.Loss); err != nil {
		return "loss", err
	}
	return "", nil
}

// CheckAll reports a mapping that stands twice, or a name that two have.
func CheckAll(all []Mapping) error {
	seen := map[string]bool{}
	for _, m := range all {
		if seen[m.id()] {
			return fmt.Errorf("two mappings are called %q", m.id())
		}
		seen[m.id()] = true
	}
	return nil
}

func (m *Mapping) access() string {
	if m.Access == "" {
		return blk.ReadWrite.String()
	}
	return m.Access
}

// id names the mapping among those of the configuration.
func (m *Mapping) id() string {
	switch {
	case m.Name != "":
		return m.Name
	case m.Session != "":
		return m.Session + "/" + m.Device
	}
	return m.Server[0] + "/" + m.Device
}

// String is the mapping as the words of "rnbd map".
func (m Mapping) String() string {
	words := []string{m.Device}
	if len(m.Server) > 0 {
		words = append(append(words, "from"), m.Server...)
	}
	words = append(words, m.access())
	for _, f := range []struct{ flag, value string }{
		{"session", m.Session}, {"loss", m.Loss}, {"frontend", m.Frontend}, {"io-mode", m.IOMode},
	} {
		if f.value != "" {
			words = append(words, "--"+f.flag+" "+f.value)
		}
	}
	return strings.Join(words, " ")
}

// equal reports whether a mapping as o serves for m.
func (m *Mapping) equal(o *Mapping) bool {
	return m.Device == o.Device && slices.Equal(m.Server, o.Server) && m.Name == o.Name && m.Session == o.Session && m.access() == o.access() &&
		m.Loss == o.Loss && m.Frontend == o.Frontend && m.IOMode == o.IOMode && maps.Equal(m.Options, o.Options)
}

// Request returns the request of m for the daemon. loss is that of mappings
// that name none.
func (m *Mapping) Request(loss client.Loss) (client.MapRequest, error) {
	mode, ok := blk.ParseAccessMode(m.access())
	if !ok {
		return client.MapRequest{}, fmt.Errorf("access %q: use ro, rw or migration", m.Access)
	}
	if m.Loss != "" {
		var err error
		if loss, err = client.ParseLoss(m.Loss); err != nil {
			return client.MapRequest{}, err
		}
	}
	return client.MapRequest{
		Path: names.Parse(m.Device), Session: names.Parse(m.Session), Paths: m.Server, Mode: mode, Frontend: m.Frontend, Loss: loss, Name: m.Name,
		Options: m.Options, IOMode: m.IOMode, AnyPath: true,
	}, nil
}
