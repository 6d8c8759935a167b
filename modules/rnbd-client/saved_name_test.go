package client

import (
	"encoding/json"
	"testing"
)

// Names that are UTF-8 stay strings in the state file, as older versions write and read
// them. Others keep their bytes.
func TestSavedNamesKeepTheirBytes(t *testing.T) {
	for name, want := range map[savedName]string{
		"disk.img": `"disk.img"`, `a\b`: `"a\\b"`, "": `""`, "{": `"{"`, "caf\xe9": `{"bytes":"Y2Fm6Q=="}`,
	} {
		text, err := json.Marshal(name)
		if err != nil || string(text) != want {
			t.Errorf("%q is %s, %v", string(name), text, err)
		}
		var got savedName
		if err := json.Unmarshal(text, &got); err != nil || got != name {
			t.Errorf("%s is read as %q, %v", text, string(got), err)
		}
	}
}
